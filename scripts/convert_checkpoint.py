#!/usr/bin/env python3
"""Convert a checkpoint: convert_checkpoint.py SRC DST --to hf|orbax [--dtype DTYPE]."""

import argparse
import logging
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def main() -> int:
    parser = argparse.ArgumentParser(description="Convert a GGUF file, a Hugging Face or an Orbax directory. The result is verified before it takes its place.")
    parser.add_argument("source", help="a .gguf file or a model directory")
    parser.add_argument("destination", help="the directory to write; an older model there is replaced only on success")
    parser.add_argument("--to", required=True, choices=("hf", "orbax"), help="format of the result")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="cast the weights (default: keep each tensor's own)")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    for noisy in ("absl", "jax", "orbax"):
        logging.getLogger(noisy).setLevel(logging.ERROR)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # nothing here needs an accelerator
    from compare.convert import convert
    from jax_decoder.errors import DecoderError

    try:
        report = convert(args.source, args.destination, args.to, args.dtype)
    except (DecoderError, OSError) as error:
        print(f"convert_checkpoint: {error}".replace("\n", "; "), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("convert_checkpoint: interrupted; nothing was changed", file=sys.stderr)
        return 2
    casts = ", ".join(f"{count} cast {label}" for label, count in report["casts"].items()) or "no casts"
    print(f"{args.destination}: {report['tensors']} tensors, {report['bytes'] / 1e6:.1f} MB, {casts}, verified")
    return 0


if __name__ == "__main__":
    sys.exit(main())
