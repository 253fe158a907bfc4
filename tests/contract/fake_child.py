#!/usr/bin/env python3
"""A stand-in for the interpreter that runs slices: takes `-m autocompile.slice FOLDER`, imports nothing heavy.

Tests pass `make_python(folder)` where `--python` is wanted. By default it is a deterministic fast trainer: a preflight
request is answered with the facts of one CPU (32 layers, 1.1 B parameters), a measure request with tokens per second
that are a simple function of the config, see `tokens_per_second`. It ends when its standard input closes.

Options of the workload (`--set workload.NAME=VALUE`) change that:

    fake_device=cuda       facts of a GPU of 80 GiB (capability 9.0); fake_gpus=2: of two
    fake_layers, fake_parameters   other facts
    fake_environment=TEXT  another environment, as after an upgrade
    fake_seconds=0.3       each slice takes so long, one step every 10 ms (stages compile, warmup, measure, check)
    fake_oom_above=32      larger micro-batches answer with an `oom` failure
    fake_share=0.97        progress.json reports a device this full
    fake_preflight=KIND    the preflight answers with a failure of this kind
    fake_cache_kib=64      each slice leaves so much in its cache folder
    fake=BEHAVIOUR         what measure requests do instead, see BEHAVIOURS
    fake_when=KNOB=VALUE,...   ... only for configs with these values
    fake_once=true         ... only the first time for each cache folder
    fake_text=TEXT         what `text`, `crash` and `kill` print first
    fake_texts=FILE        ... of which each takes the first of this file's JSON list, while there is one
    fake_kind=KIND         what kind of failure `failure` answers with (workload_error)
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time

SCOPES = {"none": 1.0, "layer": 1.5, "model": 1.45, "attention": 1.1, "mlp": 1.2}
MODES = {"default": 1.0, "reduce-overhead": 1.1, "max-autotune-no-cudagraphs": 1.02, "max-autotune": 1.12}
COMPILE_SECONDS = {"none": 0.0, "layer": 2.0, "model": 10.0, "attention": 1.0, "mlp": 1.0}
GIB = 1 << 30


SERVER = """
import sys
sys.path[:0] = {paths}
from autocompile.slice.server import main
from tests.contract import fake_child
main(fake_child.main, lambda: None)
"""


def make_python(folder, *, warm=False):
    """A program in this folder that runs the fake child with the interpreter at hand; its path, for `--python`.

    With ``warm`` it also takes `-m autocompile.slice.server`: the real server, which forks fake children.
    """
    path, here = os.path.join(str(folder), "fake-python"), os.path.abspath(__file__)
    root = os.path.dirname(os.path.dirname(os.path.dirname(here)))
    server = f"exec {sys.executable} -S -c '{SERVER.format(paths=json.dumps([root]))}'" if warm else "exit 1"
    with open(path, "w") as file:
        file.write(f'#!/bin/sh\nif [ "$2" = autocompile.slice.server ]; then {server}; fi\n')
        file.write(f'exec {sys.executable} -I -S {here} "$@"\n')
    os.chmod(path, 0o755)
    return path


def tokens_per_second(config):
    """More with a larger micro-batch (1000 at 4, at most 1250 eager), with compile, without checkpointing."""
    batch = config["micro_batch"]
    value = 1250.0 * batch / (batch + 1)
    value *= SCOPES.get(config["scope"], 1.05)
    if config["scope"] != "none":
        value *= MODES[config["mode"]]
    if config["gradient_checkpointing"]:
        value *= 0.75
    if config["sdpa"] == "math":
        value *= 0.8
    return value


def main(folder):
    with open(os.path.join(folder, "request.json")) as file:
        request = json.load(file)
    threading.Thread(target=end_with_parent, daemon=True).start()
    options = request["workload"]["options"]
    if request["type"] == "preflight":
        preflight(folder, options)
    else:
        measure(folder, request, options)


def end_with_parent():
    while os.read(0, 1024):
        pass
    os._exit(1)


def preflight(folder, options):
    if "fake_preflight" in options:
        if options["fake_preflight"] == "hang":
            time.sleep(600)
        kind = options["fake_preflight"]
        fail(folder, kind, stage="preflight", message=f"the fake preflight fails with {kind}")
        return
    gpu = options.get("fake_device") == "cuda"
    cpu = {"type": "cpu", "uuid": "cpu", "name": "Fake CPU", "memory_bytes": 16 * GIB}
    gpus = [
        {"type": "cuda", "uuid": f"GPU-{n}", "name": "Fake H100", "memory_bytes": 80 * GIB, "capability": "9.0"}
        for n in range(options.get("fake_gpus", 1))
    ]
    answer(
        folder,
        {
            "type": "facts",
            "devices": gpus if gpu else [cpu],
            "layers": options.get("fake_layers", 32),
            "parameters": options.get("fake_parameters", 1_100_000_000),
            "environment": {"gpu": "Fake H100" if gpu else "cpu", "torch": options.get("fake_environment", "2.13.0")},
            "model_type": "llama",
            "method": "lora",
            "precision": "bf16" if gpu else "fp32",
            "regions": {"layer": "model.layers.*"},
        },
    )


def measure(folder, request, options):
    with open(os.path.join(request["cache_folder"], "compiled"), "wb") as file:
        file.write(os.urandom(1024) * options.get("fake_cache_kib", 0))
    if is_chosen(request, options):
        BEHAVIOURS[options["fake"]](folder, request, options)
        return
    if request["config"]["micro_batch"] > options.get("fake_oom_above", 1 << 30):
        fail(folder, "oom", stage="warmup", message="CUDA out of memory. Tried to allocate 2.00 GiB")
        return
    train(folder, options)
    answer(folder, measurement(request["config"]))


def is_chosen(request, options):
    if "fake" not in options:
        return False
    for part in filter(None, str(options.get("fake_when", "")).split(",")):
        knob, _, value = part.partition("=")
        if str(request["config"][knob]).lower() != value.lower():
            return False
    if "fake_texts" in options:
        with open(options["fake_texts"]) as file:
            if not json.load(file):
                return False
    if options.get("fake_once"):
        marker = os.path.join(request["cache_folder"], "fake-was-here")
        if os.path.exists(marker):
            return False
        open(marker, "w").close()
    return True


def train(folder, options):
    """Steps of 10 ms for as long as asked; the stages in their order."""
    seconds = options.get("fake_seconds", 0.0)
    progress(folder, options, "compile", 0)
    began, step = time.monotonic(), 0
    while (gone := time.monotonic() - began) < seconds:
        time.sleep(min(0.01, seconds - gone))
        step += 1
        progress(folder, options, "warmup" if gone < seconds / 2 else "measure", step)
    progress(folder, options, "check", step)


def measurement(config):
    speed = tokens_per_second(config)
    step = config["micro_batch"] * 512 / speed
    memory = 4 * GIB + config["micro_batch"] * (GIB // 4 if config["gradient_checkpointing"] else GIB)
    compile_seconds = COMPILE_SECONDS.get(config["scope"], 1.0)
    compiled = config["scope"] != "none"
    return {
        "type": "measurement",
        "measurement": {
            "tokens_per_second": speed,
            "step_seconds": {"median": step, "low": step * 0.99, "high": step * 1.01, "n": 10},
            "compile": {
                "seconds": compile_seconds,
                "cold_seconds": compile_seconds,
                "cache": "cold" if compiled else "none",
            },
            "peak_memory_bytes": memory,
            "reserved_memory_bytes": memory + GIB // 2,
            "device_memory_bytes": memory + GIB,
            "losses": [6.3, 6.2, 6.1],
        },
        "telemetry": {"compile_applied": "all" if compiled else "none", "graphs": 2 if compiled else 0},
    }


def answer(folder, document):
    """Written aside and renamed, as a real slice does."""
    path = os.path.join(folder, "outcome.json")
    with open(path + ".part", "w") as file:
        json.dump(document, file)
    os.replace(path + ".part", path)


def fail(folder, kind, *, stage, message):
    answer(folder, {"type": "failure", "failure": {"kind": kind, "stage": stage, "message": message}})


def progress(folder, options, stage, step):
    share = options.get("fake_share")
    path = os.path.join(folder, "progress.json")
    memory = None if share is None else int(share * 80 * GIB)
    with open(path + ".part", "w") as file:
        values = {"stage": stage, "step": step, "time": time.time()}
        json.dump({**values, "reserved_memory_bytes": memory, "device_memory_bytes": memory}, file)
    os.replace(path + ".part", path)


def oom(folder, request, options):
    fail(folder, "oom", stage="warmup", message="CUDA out of memory. Tried to allocate 2.00 GiB")


def failure(folder, request, options):
    kind = options.get("fake_kind", "workload_error")
    fail(folder, kind, stage="build", message=f"the fake child fails with {kind}")


def hang(folder, request, options):
    time.sleep(600)


def hang_in_compile(folder, request, options):
    progress(folder, options, "compile", 0)
    time.sleep(600)


def hang_in_step(folder, request, options):
    for step in range(1, 4):
        progress(folder, options, "measure", step)
        time.sleep(0.1)
    time.sleep(600)


def say(options):
    words = options.get("fake_text", "")
    if "fake_texts" in options:
        with open(options["fake_texts"]) as file:
            words, *rest = json.load(file)
        with open(options["fake_texts"], "w") as file:
            json.dump(rest, file)
    print(words, flush=True)


def text(folder, request, options):
    """Print and exit 1 without an answer."""
    progress(folder, options, "warmup", 1)
    say(options)
    sys.exit(1)


def kill(folder, request, options):
    progress(folder, options, "warmup", 1)
    say(options)
    os.kill(os.getpid(), signal.SIGKILL)


def crash(folder, request, options):
    progress(folder, options, "warmup", 1)
    say(options)
    signal.signal(signal.SIGSEGV, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGSEGV)


def half_written(folder, request, options):
    with open(os.path.join(folder, "outcome.json"), "w") as file:
        file.write('{"type": "measurement", "measurement": {"tokens_per_se')


def facts_instead(folder, request, options):
    preflight(folder, {})


def hang_at_exit(folder, request, options):
    answer(folder, measurement(request["config"]))
    time.sleep(600)


def slow(folder, request, options):
    """Ten minutes of work that goes on all the time."""
    train(folder, {**options, "fake_seconds": 600})
    answer(folder, measurement(request["config"]))


def chatter(folder, request, options):
    """Some 40 MiB of output."""
    print("the first line")
    for number in range(40):
        print(f"{number:1048575d}", flush=True)
        time.sleep(0.01)
    print("the last line", flush=True)
    answer(folder, measurement(request["config"]))


def hang_with_children(folder, request, options):
    leave_children(folder, request, options, answered=False)
    progress(folder, options, "warmup", 1)
    time.sleep(600)


def leave_children(folder, request, options, answered=True):
    """A child in a session of its own, and one whose parent is gone besides; their pids in grandchildren.txt."""
    with open(os.path.join(folder, "grandchildren.txt"), "w") as file:
        for orphan in (False, True):
            read, write = os.pipe()
            if (child := os.fork()) == 0:
                if orphan and os.fork() != 0:
                    os._exit(0)
                os.setsid()
                os.write(write, str(os.getpid()).encode())
                time.sleep(600)
                os._exit(0)
            file.write(os.read(read, 32).decode() + "\n")
            if orphan:
                os.waitpid(child, 0)
    if answered:
        answer(folder, measurement(request["config"]))


BEHAVIOURS = {
    "oom": oom,  # answer with a failure of kind oom
    "failure": failure,  # answer with a failure of kind fake_kind
    "hang": hang,  # sleep, no progress.json
    "hang_in_compile": hang_in_compile,
    "hang_in_step": hang_in_step,  # three steps, then nothing
    "text": text,  # print fake_text, exit 1, no answer
    "kill": kill,  # print fake_text, SIGKILL itself
    "crash": crash,  # print fake_text, SIGSEGV itself
    "half_written": half_written,  # an outcome.json that ends in the middle
    "facts_instead": facts_instead,  # an answer of the wrong type
    "hang_at_exit": hang_at_exit,  # answer, then sleep
    "chatter": chatter,  # 40 MiB of output, then an answer
    "slow": slow,  # steps for ten minutes, then an answer
    "leave_children": leave_children,  # answer, and leave two grandchildren with sessions of their own
    "hang_with_children": hang_with_children,  # the same without an answer or an end
}

if __name__ == "__main__":
    main(sys.argv[3])
