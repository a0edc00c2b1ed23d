"""Long summaries, decoded with everything resident and with history on the host, compared.

Runs the same model twice on the same prompts, in the same batches and with the same records, and
gives ROUGE-L of each run against the reference summaries and of one against the other, and the
fraction of identical tokens. Fails (1) if tokens differ, if a step decoded fewer than 2 requests or
if a history fitted its lease; 2 is an argument that is wrong.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args

import torch
import transformers
from rich.console import Console
from rich.progress import Progress
from transformers import AutoTokenizer, PreTrainedModel

import sparse_kvcm
from benchmarks.accuracy import dataset, models, report
from benchmarks.accuracy.decode import Run, WorthlessRunError, decode
from benchmarks.accuracy.workers import CacheConfig, Form, Sizes, cache_config, make_worker
from sparse_kvcm.models import IndexDtype, KvDtype

Text = Callable[[Sequence[int]], str]
NAMES = ("offloaded", "resident")  # in this order: what makes a run worthless shows at once


def make_parser() -> argparse.ArgumentParser:
    """The command's options."""
    parser = argparse.ArgumentParser(
        prog="scripts/accuracy",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--checkpoint", type=Path, metavar="DIR", help="GLM-5, DeepSeek-V3.2 or V4")
    model.add_argument(
        "--tiny", choices=list(models.TINY_TOKENS), help="a tiny random checkpoint, random prompts"
    )
    add("--dataset", type=Path, metavar="FILE", help='JSON lines {"document", "summary"}')
    add("--kv-dtype", choices=get_args(KvDtype), default="bf16", help="records (default: bf16)")
    add("--index-dtype", choices=get_args(IndexDtype), default="fp8", help="default: fp8")
    add("--kv-scale", type=float, default=1.0, help="of fp8 and nvfp4 records (default: 1)")
    add("--requests", type=int, default=4, help="records of the file (default: 4)")
    add("--batch-size", type=int, default=4, help="most requests of a step (default: 4)")
    add("--document-tokens", type=int, default=8192, help="cut documents there (default: 8192)")
    add("--new-tokens", type=int, help="most tokens of a summary (default: 512, tiny 24)")
    add("--gpu-cache-factor", type=int, default=2, help="lease by selection (default: 2)")
    add("--form", choices=get_args(Form), default="compact", help="how selected units are read")
    add("--min-agreement", type=float, default=1.0, help="identical tokens at least (default: 1)")
    add("--device", default="cpu", help="cpu (the default), cuda or cuda:<index>")
    add("--json", type=Path, metavar="FILE", help="where to write all figures")
    return parser


def check(options: argparse.Namespace) -> str | None:
    """Say which option is wrong, if one is."""
    if (options.checkpoint is None) != (options.dataset is None):
        return "--checkpoint and --dataset go together; --tiny takes neither"
    least = {"requests": 1, "batch_size": 1, "document_tokens": 1, "gpu_cache_factor": 1}
    for name, limit in (least | {"new_tokens": 2}).items():
        if getattr(options, name) < limit:
            option = "--" + name.replace("_", "-")
            return f"{option} must be >= {limit}, got {getattr(options, name)}"
    if options.kv_scale <= 0:
        return f"--kv-scale must be > 0, got {options.kv_scale}"
    if not 0 <= options.min_agreement <= 1:
        return f"--min-agreement must be in [0, 1], got {options.min_agreement}"
    return _device_fault(options.device) or _file_fault(options.json)


def _device_fault(device: str) -> str | None:
    if re.fullmatch(r"cpu|cuda(:\d+)?", device) is None:
        return f"--device must be cpu, cuda or cuda:<index>, got {device}"
    if device == "cpu":
        return None
    if (torch.device(device).index or 0) >= torch.cuda.device_count():
        return f"--device {device} is not there: torch finds {torch.cuda.device_count()} GPUs"
    if not sparse_kvcm.cuda_is_available():
        return f"--device {device} is not there: {sparse_kvcm.cuda_unavailable_reason()}"
    return None


def _file_fault(path: Path | None) -> str | None:
    if path is not None:  # now, not after hours
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            existed = path.exists()
            path.open("a").close()
            if not existed:
                path.unlink()
        except OSError as error:
            return f"--json must be a writable file, got {path}: {error}"
    return None


def prepare(
    options: argparse.Namespace,
) -> tuple[PreTrainedModel, list[dataset.Example], Text]:
    """Load the model, and make prompts in the order of their lengths: shortest first."""
    if options.tiny:
        model = models.load_tiny(options.tiny, options.device)
        tokens = models.TINY_TOKENS[options.tiny]
        examples = dataset.random_examples(options.requests, models.VOCABULARY, tokens)
        text: Text = dataset.as_words
    else:
        records = dataset.read_records(options.dataset, options.requests)
        tokenizer: Any = AutoTokenizer.from_pretrained(options.checkpoint, local_files_only=True)
        model = models.load(options.checkpoint, options.device)
        examples = dataset.summaries(records, tokenizer, options.document_tokens)

        def text(tokens: Sequence[int]) -> str:
            return str(tokenizer.decode(tokens, skip_special_tokens=True))

    # A short history fails at once, and batches of like lengths have little padding.
    return model, sorted(examples, key=lambda one: len(one.prompt)), text


def configs_of(
    options: argparse.Namespace, model: PreTrainedModel, examples: Sequence[dataset.Example]
) -> dict[str, CacheConfig]:
    """What the managers of both runs are made from."""
    sizes = Sizes(
        rows=min(options.batch_size, options.requests),
        max_length=max(len(one.prompt) for one in examples) + options.new_tokens,
        kv_dtype=options.kv_dtype,
        index_dtype=options.index_dtype,
        kv_scale=options.kv_scale,
        gpu_cache_factor=options.gpu_cache_factor,
        form=options.form,
    )
    return {name: cache_config(model, sizes, offload=name == "offloaded") for name in NAMES}


def run_both(
    options: argparse.Namespace,
    model: PreTrainedModel,
    configs: dict[str, CacheConfig],
    prompts: Sequence[Sequence[int]],
    progress: Progress,
) -> dict[str, Run]:
    """Decode all prompts offloaded, then resident."""
    runs = {}
    total = len(prompts) * options.new_tokens
    for name, config in configs.items():
        task = progress.add_task(name, total=total)
        worker = make_worker(model, config, options.form)
        try:
            runs[name] = decode(
                worker,
                prompts,
                rows=options.batch_size,
                new_tokens=options.new_tokens,
                ends=models.end_tokens(model),
                advance=lambda tokens, task=task: progress.advance(task, tokens),  # type: ignore[misc]
            )
        finally:
            worker.driver.close()
            del worker
            gc.collect()  # the next manager wants the memory
        progress.update(task, completed=total)
    return runs


@contextmanager
def deterministic() -> Iterator[None]:
    """Let torch add in one order where it can: two equal runs then give equal tokens."""
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, compare, print and write; the exit status."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    if options.new_tokens is None:
        options.new_tokens = 24 if options.tiny else 512
    if fault := check(options):
        parser.error(fault)
    if options.device == "cpu" and options.tiny:
        torch.set_num_threads(1)  # more threads only wait for each other at this size
    console = Console(highlight=False, markup=False, soft_wrap=True)
    try:
        model, examples, text = prepare(options)
        configs = configs_of(options, model, examples)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    longest = len(examples[-1].prompt)
    console.print(
        f"transformers {transformers.__version__}: {model.config.model_type}, "
        f"{options.kv_dtype} records, {len(examples)} prompts of {len(examples[0].prompt)} to "
        f"{longest} tokens, {options.batch_size} a batch, on {options.device}"
    )
    record: dict[str, Any] = vars(options) | {"model_type": model.config.model_type}
    try:
        with Progress(console=console) as progress, deterministic():
            prompts = [one.prompt for one in examples]
            runs = run_both(options, model, configs, prompts, progress)
        figures = report.compare(
            runs["resident"], runs["offloaded"], [one.reference for one in examples], text
        )
        record |= {name: dataclasses.asdict(run) for name, run in runs.items()}
        record |= dataclasses.asdict(figures) | {"agreement": figures.agreement}
        report.show(console, runs["resident"], runs["offloaded"], figures)
        faults = report.faults_of(figures, options.min_agreement)
    except WorthlessRunError as error:
        faults = [str(error)]
    if options.json:
        text_of = json.dumps(record | {"faults": faults}, indent=1, default=str)
        options.json.write_text(text_of + "\n")
    for fault in faults:
        console.print(f"FAILED: {fault}")
    if not faults:
        console.print(f"tokens identical: {figures.identical:,} of {figures.total:,}")
    return 1 if faults else 0
