"""A stock DeepSeek-V3.2 on a DSA cache manager: glm5.py with another model and the same options."""

from __future__ import annotations

import sys

from glm5 import SIZES, Model, main
from transformers import DeepseekV32Config, DeepseekV32ForCausalLM


def v32() -> Model:
    """Five layers, each with an indexer."""
    return DeepseekV32ForCausalLM, DeepseekV32Config(**SIZES)


if __name__ == "__main__":
    sys.exit(main(name="DeepSeek-V3.2", make=v32))
