"""How tests drive cllm. There are two ways, and every test uses one of them.

**Step by step, in this process** (`tests.driver.engine`). `StepDriver` runs an `EngineCore` on the test's own
thread, one step at a time, on any `ModelRunner`: the exact, instant `FakeRunner`, or
llama.cpp with a tiny model. Nothing runs between two steps, so a test can cancel, fail a native call or look
into KV memory at a precise moment. After every step the driver checks the invariants (`docs/invariants.md`)::

    driver = StepDriver(FakeRunner(sequences=2))
    driver.submit(ask("a", words(seed=1, length=30), max_tokens=8))
    driver.step()                      # one step: schedule, compute, update
    answers = driver.finish()          # until idle; then no slot is leased and no KV cell is in use
    assert answers["a"].finish_reason is FinishReason.LENGTH

- `kinds` opens runners: `Kind` names a model and a KV layout, the fixture `opened` closes what it opens.
- `runner` has `CheckedRunner`, which every driver puts around its runner, and what tests do on a bare runner.
- `scenarios` has random workloads with failures, and the failure of each native call in turn.
- `same_text` compares a text under load with the text alone (the same-text rule).

**A real server over HTTP** (`tests.driver.server`). `Server` starts `cllm serve` as its own process with its
two workers, on a free port; the fixtures `tiny`, `embedded` and `start` hand servers out. For everything that
a client can see, and for what happens to processes::

    with Server(log, str(model), "--parallel", "4") as server:
        assert server.generate("Hello", 8)["text"]
        wait_for(server.idle)          # /debug/kv: no lease, no cell in use

- `http` has the shape of a refusal, and bare sockets for requests that no client library would send.
- `program` forks servers from a process that has imported cllm; their workers are new interpreters, as ever.
- `option_matrix` starts servers without the settings that `Server` adds (one thread, no disk cache), and
  has a row for every option.
- A duration is judged by `Stopwatch` or `cpu_s`, which do not grow because the machine is busy.

Which way? A property of scheduling, memory or sampling: step by step. A status, a stream, a signal or a
process: a server. Every wait has a limit: `wait_for` takes one, and `pytest-timeout` ends a test that hangs.
"""
