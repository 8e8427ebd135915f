"""``python -m jax_decoder PROMPT --model DIR``: complete one prompt on the command line."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import CheckpointError, Decoder, DecoderError, Sampling, xla_flags

DEMO_MODEL = "models/smollm2-135m-instruct"


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="python -m jax_decoder", description="Complete one prompt with the JAX decoder.")
    p.add_argument("prompt", help="the text to go on from")
    p.add_argument("--model", default=DEMO_MODEL, help="model directory (default: %(default)s)")
    p.add_argument("--chat", action="store_true", help="send the prompt as a user message through the chat template")
    p.add_argument("--max-new-tokens", type=int, default=128, help="tokens to generate at most (default: %(default)s)")
    p.add_argument("--max-seq-len", type=int, default=2048, help="cache length in tokens (default: %(default)s)")
    p.add_argument("--dtype", default="bfloat16", help="float32, bfloat16 or float16 (default: %(default)s)")
    p.add_argument("--device", default="auto", help="auto, cpu or cuda (default: %(default)s)")
    p.add_argument("--launch", default="auto", help="how a step reaches the device (default: %(default)s)")
    p.add_argument("--kernels", default="auto", help="which kernels a layer uses (default: %(default)s)")
    p.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default: %(default)s)")
    p.add_argument("--top-k", type=int, default=0, help="0 is off (default: %(default)s)")
    p.add_argument("--top-p", type=float, default=1.0, help="1 is off (default: %(default)s)")
    p.add_argument("--min-p", type=float, default=0.0, help="0 is off (default: %(default)s)")
    p.add_argument("--seed", type=int, default=0, help="of sampling (default: %(default)s)")
    p.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before this text; may be repeated")
    p.add_argument("--json", action="store_true", help="print one JSON object instead of streaming the text")
    return p


def run(args: argparse.Namespace) -> None:
    sampling = Sampling(temperature=args.temperature, top_k=args.top_k, top_p=args.top_p, min_p=args.min_p, seed=args.seed)
    prompt: Any = [{"role": "user", "content": args.prompt}] if args.chat else args.prompt
    settings = {"max_new_tokens": args.max_new_tokens, "sampling": sampling, "stop": args.stop}
    if not Path(args.model).expanduser().is_dir():
        raise CheckpointError(f"{Path(args.model).expanduser().resolve()}: not found, expected a model directory: scripts/quickstart makes {DEMO_MODEL}, or pass --model DIR")
    started = time.perf_counter()
    with Decoder.from_pretrained(args.model, dtype=args.dtype, device=args.device, launch=args.launch, kernels=args.kernels, max_batch=1, max_seq_len=args.max_seq_len) as decoder:
        loaded = time.perf_counter()
        if args.json:
            print(json.dumps(_complete(decoder, prompt, settings, loaded - started), ensure_ascii=False))
            return
        for piece in decoder.stream(prompt, **settings):
            print(piece, end="", flush=True)
        print()


def _complete(decoder: Decoder, prompt: Any, settings: dict[str, Any], load_s: float) -> dict[str, Any]:
    started = time.perf_counter()
    out = decoder.generate([prompt], **settings)[0]
    generate_s = time.perf_counter() - started
    return {
        "prompt_token_ids": out.prompt_token_ids,
        "token_ids": out.token_ids,
        "text": out.text,
        "finish_reason": out.finish_reason,
        "error": out.error,
        "launch": decoder.launch_report()["launch"],
        # The first generation: compilation and warm-up are in it. `compare run` measures without them.
        "timings": {"load_s": load_s, "generate_s": generate_s, "tokens_per_s": len(out.token_ids) / generate_s},
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0, or 2 with one line on stderr for bad input or a missing device."""
    try:
        xla_flags.check_environment()  # an unknown flag would end the process without a word of Python
        run(parser().parse_args(argv))
    except DecoderError as error:
        print(f"jax_decoder: {error}".replace("\n", "; "), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("jax_decoder: interrupted", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
