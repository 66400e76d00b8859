"""A stand-in for a model: answers the n-th prompt of a run with the n-th file of a folder, and keeps the prompts."""

import fcntl
import sys
from pathlib import Path

folder = Path(sys.argv[1])
prompt = sys.stdin.read()
with (folder / "lock").open("a") as lock:
    fcntl.flock(lock, fcntl.LOCK_EX)
    number = len(list(folder.glob("prompt-*"))) + 1
    (folder / f"prompt-{number}").write_text(prompt)
answer = folder / f"answer-{number}"
if not answer.exists():
    sys.exit(f"no answer {number}")
print(answer.read_text())
