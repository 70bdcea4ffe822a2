"""A trial without JAX: its speed follows from its batch and its card, as two cards of one kind differ.

JEPA_JAX_MEET=N makes the first trials of N cards wait for each other, which trials one after the other could not do.
"""

import json
import os
import pathlib
import sys
import time

request, result = (pathlib.Path(argument) for argument in sys.argv[1:])
asked, card = json.loads(request.read_text()), os.environ.get("CUDA_VISIBLE_DEVICES", "none")
batch, accum = (asked["combination"][name] for name in ("batch_size", "grad_accum_steps"))
meeting = request.parents[1] / "met"
meeting.mkdir(exist_ok=True)
(meeting / card).touch()
until = time.monotonic() + 600
while len(list(meeting.iterdir())) < int(os.environ.get("JEPA_JAX_MEET", "1")):
    if time.monotonic() > until:
        sys.exit("the trials of the other cards did not come")
    time.sleep(0.01)
if accum == 2:
    print("CUDA_ERROR_OUT_OF_MEMORY: out of memory", flush=True)
    os.abort()
noise = 1 + 0.001 * (sum(map(ord, request.parent.name)) % 7)
speed = 10.0 * batch * noise * (0.9 if card == "1" else 1.0)
figures = {"samples_per_sec": speed, "process_memory_bytes": 10**9, "notes": [card], "card": f"here {card}"}
result.write_text(json.dumps({"status": "ok", "reason": "", **figures}))
