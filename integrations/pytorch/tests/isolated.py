"""Runs the entries of a database in worker processes. An entry that crashes or hangs counts as failed, and the next entries still run."""

import json
import subprocess
import sys
import threading
import tomllib
from pathlib import Path


def add_options(parser):
    import argparse

    parser.add_argument("--entries", nargs="*", default=["*"], help="patterns of names")
    parser.add_argument("--seconds", type=int, default=300, help="for one entry")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--start", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--step", type=int, default=1, help=argparse.SUPPRESS)


def worker(arguments, entries, run):
    """Runs every `step`-th entry in a child process and prints the results. An entry is (position, name, case)."""
    import torch

    torch.set_num_threads(1)
    for position, name, one in entries:
        if position < arguments.start or (position - arguments.start) % arguments.step:
            continue
        print(json.dumps({"position": position, "begins": name}), flush=True)
        print(json.dumps({"position": position, "name": name, "result": run(one, name)}), flush=True)


def lost(reason):
    return {"passed": 0, "failed": 1, "skipped": 0, "no_row": [], "refused": {}, "failures": [reason]}


def _shard(script, options, arguments, first, results, lock):
    """Runs every `jobs`-th entry from `first` on in a child process, which is restarted after an entry that ended it."""
    start, step = first, arguments.jobs
    while True:
        command = [sys.executable, script, "--worker", "--start", str(start), "--step", str(step), *options, "--entries", *arguments.entries]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        current, hung = None, threading.Event()

        def stop():
            hung.set()
            process.kill()

        timer = threading.Timer(600, stop)
        timer.start()
        for line in process.stdout:
            if not line.startswith('{"position"'):
                continue
            message = json.loads(line)
            if "begins" in message:
                current = message
                timer.cancel()
                timer = threading.Timer(arguments.seconds, stop)
                timer.start()
            else:
                current = None
                if message["result"] is not None:
                    with lock:
                        results[message["name"]] = message["result"]
        timer.cancel()
        status = process.wait()
        if current is None:
            if status != 0:
                with lock:
                    results[f"worker {first}"] = lost(f"crashes: status {status} between entries")
            return
        with lock:
            results[current["begins"]] = lost("hangs" if hung.is_set() else f"crashes: status {status}")
        start = current["position"] + step


def run(script, options, arguments):
    """Returns the results of all entries by name. They are computed by `jobs` children that run `script` with `options`."""
    results, lock = {}, threading.Lock()
    shards = [threading.Thread(target=_shard, args=(script, options, arguments, i, results, lock)) for i in range(arguments.jobs)]
    for one in shards:
        one.start()
    for one in shards:
        one.join()
    return results


def crashed(result):
    return any(text.startswith(("crashes", "hangs")) for text in result["failures"])


def known_failures(section):
    """The number of samples that may fail, for each entry in a section of known_failures.toml."""
    known = tomllib.loads(Path(__file__).with_name("known_failures.toml").read_text())
    return {name: one["samples"] for name, one in known.get(section, {}).items()}
