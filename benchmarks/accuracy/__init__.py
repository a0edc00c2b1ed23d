"""Does offload change what a model writes? Long summaries, decoded resident and offloaded.

dataset   records of a JSON-lines file, prompts, random ones for tiny models
models    checkpoints, and tiny random ones
workers   a model, a manager of its kind and a step driver
decode    batches through a worker, and what makes a run worthless
rouge     ROUGE-L
report    figures, the table, the verdict
cli       the command
"""
