"""`vllm serve` in processes of its own, and the tokens that it answers over HTTP, as JSON.

    python scripts/engines/vllm_http_job.py JOB.json

A job is that of vllm_job.py, with one task of kind "tokens"; its requests are sent at once. The
server's log goes to where this program's goes.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vllm_job import prompts

START_SECONDS = 300


def flags(engine: dict[str, Any]) -> Iterator[str]:
    """Yield the arguments of an engine as options of the command line."""
    for name, value in engine.items():
        option = name.replace("_", "-")
        if isinstance(value, bool):
            yield f"--{option}" if value else f"--no-{option}"
        else:
            yield f"--{option}"
            yield json.dumps(value) if isinstance(value, dict) else str(value)


@contextmanager
def server(model: str, engine: dict[str, Any]) -> Iterator[str]:
    """Start a server, and yield its address when it answers."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model]
    command += ["--host", "127.0.0.1", "--port", str(port), *flags(engine)]
    process = subprocess.Popen(command, env=os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"})
    address = f"http://127.0.0.1:{port}"
    try:
        wait(process, address)
        yield address
    finally:
        process.terminate()
        process.wait(60)


def wait(process: subprocess.Popen[bytes], address: str) -> None:
    """Return when the server is healthy; raise if it ends or takes too long."""
    start = time.monotonic()
    while time.monotonic() - start < START_SECONDS:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with exit status {process.returncode}")
        try:
            with urllib.request.urlopen(f"{address}/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    raise TimeoutError(f"the server did not answer within {START_SECONDS} s")


def complete(address: str, model: str, prompt: list[int], new: int) -> list[int]:
    """Return the greedy tokens after a prompt of tokens."""
    asked = {
        "model": model,
        "prompt": prompt,
        "max_tokens": new,
        "temperature": 0.0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    request = urllib.request.Request(
        f"{address}/v1/completions",
        json.dumps(asked).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=300) as answer:
        (choice,) = json.load(answer)["choices"]
    tokens: list[int] = choice["token_ids"]
    return tokens


def main(path: Path) -> None:
    """Run the job in `path`."""
    job = json.loads(path.read_text())
    (task,) = job["tasks"]
    vocabulary = json.loads(Path(job["model"], "config.json").read_text())["vocab_size"]
    given = prompts(task["seed"], task["lengths"], vocabulary)
    engine = {key: value for key, value in job["engine"].items() if key != "skip_tokenizer_init"}
    with server(job["model"], engine) as address, ThreadPoolExecutor(len(given)) as pool:
        made = pool.map(lambda each: complete(address, job["model"], each, task["new"]), given)
        gave = {"task": task, "tokens": list(made), "logprobs": None}
    Path(job["result"]).write_text(json.dumps({"name": job.get("name"), "tasks": [gave]}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
