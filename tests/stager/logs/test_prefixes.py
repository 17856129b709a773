"""Lines as launchers, loggers and collectors write them, and the text that a program wrote."""

from __future__ import annotations

import time

import pytest

from stager.logs.prefixes import parse_line, show_as_terminal, show_block_as_terminal

FRAME = '  File "train.py", line 3, in main'
CTIME = "Sat Nov 28 21:08:12 2026"
TRACE = "Traceback (most recent call last):"

# Each prefix as its program writes it, with what it tells; {} is the program's own text.
PREFIXES = [
    ("[rank3]: {}", {"rank": 3}),
    ("[default1]:{}", {"local_rank": 1}),
    ("[default1]:[rank12]: {}", {"local_rank": 1, "rank": 12}),
    ("[trainer0|default1]:{}", {"local_rank": 1}),
    ("[gpu-01:3]:{}", {"local_rank": 3, "node": "gpu-01"}),
    ("[gpu01.cluster: 3]:{}", {"local_rank": 3, "node": "gpu01.cluster"}),
    ("trainer/0 [3]:{}", {"local_rank": 3}),
    ("[4]: {}", {"rank": 4}),
    ("[1,3]<stderr>:{}", {"rank": 3}),
    ("Sat Nov 22 05:21:32 2026[1,3]<stderr>:{}", {"rank": 3, "stamp": "Sat Nov 22 05:21:32 2026"}),
    ("Sat Nov 22 05:21:32 2026<stdout>:{}", {"stamp": "Sat Nov 22 05:21:32 2026"}),
    ("[prterun-n1-123@1,3]<stdout>: {}", {"rank": 3}),
    ("[prterun-n1-123@1,3][node1:4711]<stderr>:{}", {"rank": 3, "node": "node1"}),
    ("[1,mpirank:3,algo-2]<stderr>:{}", {"rank": 3, "node": "algo-2"}),
    ("[3] {}", {"rank": 3}),
    (" 3: {}", {"task": 3}),
    ("12: [default0]:{}", {"task": 12, "local_rank": 0}),
    ("node1: {}", {"node": "node1"}),
    ("10.0.0.5: [rank8]: {}", {"node": "10.0.0.5", "rank": 8}),
    ("worker1: [default0]:[rank8]: {}", {"node": "worker1", "local_rank": 0, "rank": 8}),
    ("(RayTrainWorker pid=518, ip=10.0.0.5) {}", {"node": "10.0.0.5"}),
    ("\x1b[36m(train_fn pid=518)\x1b[0m {}", {}),
    ("(VllmWorker rank=1 pid=518) {}", {"rank": 1}),
    ("(Worker pid=518) ERROR 07-29 21:48:54 [core.py:1141] {}",
     {"level": "ERROR", "stamp": "07-29 21:48:54"}),
    ("[rank: 3] {}", {"rank": 3}),
    ("[rank=3] || {}", {"rank": 3}),
    ("[2026-11-22T05:21:32.1Z] 4c1f0a2b [rank=3] || {}",
     {"rank": 3, "stamp": "2026-11-22T05:21:32.1Z"}),
    ("E1122 05:21:32.123456 4711 torch/x.py:880] {}",
     {"level": "E", "stamp": "1122 05:21:32.123456"}),
    ("[rank0]:V1122 05:21:32.1 4711 torch/x.py:880] [__graph] {}",
     {"rank": 0, "level": "V", "stamp": "1122 05:21:32.1"}),
    ("2026-11-22T05:21:32.123456789Z {}", {"stamp": "2026-11-22T05:21:32.123456789Z"}),
    ("2026-11-22T05:21:32.123456789Z stderr F {}", {"stamp": "2026-11-22T05:21:32.123456789Z"}),
    ("Nov  2 05:21:32 node03 python[1234]: {}", {"node": "node03", "stamp": "Nov  2 05:21:32"}),
    ("<34>1 2026-11-22T05:21:32Z n3 app 12 - - {}",
     {"node": "n3", "stamp": "2026-11-22T05:21:32Z"}),
    ("[pod/train-worker-0/pytorch] {}", {"node": "train-worker-0"}),
    ("trainer-1  | {}", {}),
    ("  5%|▌    | 5/100 [00:01<00:19,  4.9it/s][rank3]: {}", {"rank": 3}),
    ("Epoch 0:  5%|▌   | 5/100 [00:01<00:19, 4.9it/s, v_num=0]{}", {}),
    ("Epoch 0/0  ━━━╺━━━━ 12/32 0:00:03 • 0:00:01 20.75it/s loss: 0.5 [rank3]: {}", {"rank": 3}),
]  # fmt: skip
LOGGERS = [
    "2026-11-22 05:21:32,250 ERROR {}",
    "2026-11-22 05:21:32,250 - accelerate.utils - ERROR - {}",
    "2026-11-22 05:21:32,250 ERROR accelerate.utils: {}",
    "2026-11-22 05:21:32,250 [ERROR] {}",
    "[2026-11-22 05:21:32,250][hydra.utils][ERROR] - {}",
    "[2026-11-22 05:21:32,250] [ERROR] [launch.py:321:sigkill_handler] {}",
    "11/22/2026 05:21:32 - ERROR - transformers.trainer - {}",
    "[titan] 2026-11-22 05:21:32,250 - root - ERROR - {}",
    "2026-11-22 05:21:32.365 | ERROR    | app.train:run:143 - {}",
    "submitit ERROR (2026-11-22 05:21:32,250) - {}",
    "[NeMo E 2026-11-22 05:21:32 model:12] {}",
    "2026-11-22 05:21:32.123456: E external/xla/x.cc:123] {}",
    "ERROR:root:{}",
]


@pytest.mark.parametrize(("shape", "told"), PREFIXES)
def test_a_prefix_is_taken_off_and_says_who_wrote(shape: str, told: dict[str, object]) -> None:
    for text in (TRACE, FRAME, "    main()", "ValueError: x"):
        found = parse_line(shape.format(text))
        assert found.text == text
    names = ("rank", "local_rank", "task", "node", "level", "stamp")
    known = {name: getattr(found, name) for name in names}
    assert {name: value for name, value in known.items() if value not in (None, "")} == told


@pytest.mark.parametrize("shape", LOGGERS)
def test_a_logger_s_prefix_is_taken_off(shape: str) -> None:
    for text in ("CUDA out of memory", TRACE, "ValueError: x", "torch.OutOfMemoryError: x"):
        found = parse_line(shape.format(text))
        assert (found.text, found.level[0]) == (text, "E")


@pytest.mark.parametrize(
    "line",
    [
        "iter     1 | loss 2.8990 | tokens/s 31001",
        "ValueError: x",
        "torch.OutOfMemoryError: x",
        "12:30:45 INFO x",
        "2026-11-22 x",
        "Epoch1: loss 0.3",
        "rank3: hello",
        "layer4: 12 parameters",
        "h5py.Error: x",
        "[1]  + exit 1     python train.py",
        "resnet50: 25 M parameters",
        "gpu0: 12 GiB",
        "[1]+  Killed                  python train.py",
        "[1]   Killed                  python train.py",
        "[1] 4711",
        "[Rank 0] Watchdog caught collective operation timeout",
        "[E304 10:22:31.4 ProcessGroupNCCL.cpp:685] [Rank 0] Watchdog",
        "host1:123:456 [3] NCCL INFO x",
        "srun: error: node3: task 5: Exited with exit code 1",
        "slurmstepd: error: *** JOB 1 ON n CANCELLED AT 2026-11-22T05:21:32 ***",
        "slurmstepd-node02: error: execve(): /x/train.sh: Permission denied",
        "train.py: error: unrecognized arguments: --x",
        "/bin/sh: 1: foo: not found",
        "bash: line 3: 1234 Killed   python",
        "ERROR: Could not install packages",
        "  5%|▌    | 5/100 [00:01<00:19,  4.9it/s]",
        '{"v": 1, "event": "x"}',
        "{not json",
    ],
)
def test_what_looks_like_a_prefix_is_left(line: str) -> None:
    found = parse_line(line)
    assert (found.text, found.logged, found.marks) == (line, line, ())


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("\x1b[1;35mModuleNotFoundError\x1b[0m: \x1b[35mNo module\x1b[0m",
         "ModuleNotFoundError: No module"),
        ("\x1b]8;;file:///x\x1b\\link\x1b]8;;\x07 \x1b[1A\x1b[2Kx", "link x"),
        ("  1%|   | 1/100\r  2%|   | 2/100\r\n", "  2%|   | 2/100"),
        ("bus error\0", "bus error"),
        ("[1,1]<stderr>:KeyError[1,1]<stderr>:: [1,1]<stderr>:'x'[1,1]<stderr>:", "KeyError: 'x'"),
        ("[1,1]<stderr>:<Model of 2 layers>[1,1]<stderr>:", "<Model of 2 layers>"),
        (f"{CTIME}[1,1]<stderr>:    {CTIME}[1,1]<stderr>:main(){CTIME}[1,1]<stderr>:",
         "    main()"),
    ],
)  # fmt: skip
def test_a_line_as_a_terminal_shows_it(line: str, text: str) -> None:
    assert show_as_terminal(line).endswith(text)
    assert parse_line(line).text == text
    assert show_block_as_terminal(line.encode()).rstrip(b"\r\n\0").decode().endswith(text)


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("╭─────── Traceback (most recent call last) ───────╮", TRACE[:-1]),
        ("│ /home/u/train.py:12 in <module>           │", "  /home/u/train.py:12 in <module>"),
        ("  | ValueError: 1", "ValueError: 1"),
        ("    | " + FRAME, FRAME),
        ('{"log":"ValueError: x\\n","stream":"stderr","time":"2026-11-22T05:21:32Z"}',
         "ValueError: x"),
        ('{"level": "error", "message": "[rank3]: ValueError: x"}', "ValueError: x"),
    ],
)  # fmt: skip
def test_boxes_margins_and_json_are_taken_off(line: str, text: str) -> None:
    assert parse_line(line).text == text


def test_a_long_line_takes_no_long_time() -> None:
    marks = ("[a1", "9", "[rank9", "1: ", "a1.", "[rank", "2026-11-22 05:21:32 ", "│ ", "%|")
    marks += ("╭─ ", "╭─ Traceback x", "<std[1")
    lines = [mark * 2_000 for mark in marks] + [f"[rank{'9' * 9_000}]: x"]
    started = time.process_time()
    for line in lines:
        parse_line(line)
    assert time.process_time() - started < 1.0
