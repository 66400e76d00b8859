"""A stand-in for the host process: answers, hangs, crashes or floods, as the request asks."""

import json
import os
import sys
import time

for line in sys.stdin:
    request = json.loads(line)
    arguments = request["arguments"]
    if request["tool"] == "hang":
        time.sleep(60)
    if request["tool"] == "crash":
        sys.stderr.write("a library says why\n")
        sys.stderr.flush()
        os._exit(3)
    if request["tool"] == "abort":
        os.abort()
    if request["tool"] == "fail":
        print(json.dumps({"error": "give another case"}), flush=True)
        continue
    for step in range(arguments.get("steps", 0)):
        print(json.dumps({"progress": [step + 1, arguments["steps"], "working"]}), flush=True)
    time.sleep(arguments.get("seconds", 0))
    print(json.dumps({"result": {"pid": os.getpid(), "arguments": arguments}}), flush=True)
