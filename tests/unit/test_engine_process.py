"""The server's process: its arguments and environment, its start, and an end that leaves nothing running.

SGLang is replaced by a program of a few lines that serves /health and, like SGLang, has a child.
"""

import asyncio
import importlib.util
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from pathlib import Path

import psutil
import pytest

from slipstream.rollout.engine import cpu
from slipstream.rollout.engine.server_process import (
    LAUNCHER,
    EngineStartError,
    MeetingPoint,
    ServerProcess,
    ServerSpec,
    server_args,
)
from tests.environment import environment
from tests.ports import held_port

STAND_IN = textwrap.dedent(
    """
    import http.server, json, mmap, os, signal, subprocess, sys, threading

    from slipstream.rollout.engine.launch import _read_key

    mode, settings = sys.argv[1], json.loads(sys.argv[-1])
    arguments = settings["server"]
    if mode == "dies":
        print("a line before", flush=True)
        sys.exit("there is no such model")
    key = _read_key()
    if mode == "launched":
        from slipstream.rollout.engine.launch import _die_with_owner
        from pathlib import Path
        temporary = Path(settings["temporary"])
        leftovers = [Path(settings["replica"]["folder"])] if settings["replica"] else []
        threading.Thread(target=_die_with_owner, args=(temporary, leftovers), daemon=True).start()
    if mode == "slow":
        import time
        time.sleep(300)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if mode == "shows":
        from slipstream.rollout.system.stacks import shows_stacks
        shows_stacks()
        forks = os.fork() == 0
        while forks:
            signal.pause()
    child = subprocess.Popen(["sglang::scheduler_TP1", "300"], executable="/bin/sleep")
    with open(f"/dev/shm/slipstream-test-{os.getpid()}", "w+b") as file:
        file.truncate(4096)
        shared = mmap.mmap(file.fileno(), 4096)
    reported = {"arguments": arguments, "environment": dict(os.environ), "child": child.pid}
    reported["temporary"] = settings["temporary"]
    print(json.dumps(reported), flush=True)
    if arguments.get("node_rank"):
        if mode != "unhealthy":
            open(os.path.join(settings["temporary"], "ready"), "w").close()
        signal.pause()

    class Health(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            allowed = self.headers["Authorization"] == f"Bearer {key}"
            self.send_response(401 if not allowed else 503 if mode == "unhealthy" else 200)
            self.end_headers()
        def log_message(self, *args):
            pass

    http.server.HTTPServer((arguments["host"], arguments["port"]), Health).serve_forever()
    """
)


def spec(**changes) -> ServerSpec:
    fields = {
        "model_path": Path("/models/tiny"),
        "dtype": "float32",
        "device": "cuda",
        "tensor_parallel": 1,
        "host": "127.0.0.1",
        "port": held_port(),
        "version": 3,
        "seed": 11,
    }
    return ServerSpec(**fields | changes)


@contextmanager
def started(folder: Path, mode: str = "healthy", **changes):
    """A stand-in server, which is ended in any case."""
    folder.mkdir(exist_ok=True)
    program = folder / "stand_in.py"
    program.write_text(STAND_IN)
    server = ServerProcess(
        spec(**changes), folder / "logs/engine-0.log", (sys.executable, str(program), mode)
    )
    try:
        yield server
    finally:
        server.stop()


def report(folder: Path) -> dict:
    """What the stand-in said about itself. A thread writes it into the file, perhaps after it is healthy."""
    log = folder / "logs/engine-0.log"
    wait_until(lambda: log.read_text().endswith("\n"))
    return json.loads(log.read_text().splitlines()[-1])


def alive(pid: int) -> bool:
    """Running, and not merely waiting for somebody to ask for its exit code."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def wait_until(condition, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "nothing came of it"
        time.sleep(0.01)


def shared_memory(pid: int) -> Path:
    return Path(f"/dev/shm/slipstream-test-{pid}")


# ---- arguments and environment


def test_server_arguments_are_the_fields_of_server_args():
    assert server_args(spec(port=30000)) == {
        "model_path": "/models/tiny",
        "dtype": "float32",
        "device": "cuda",
        "tp_size": 1,
        "host": "127.0.0.1",
        "port": 30000,
        "weight_version": "3",
        "random_seed": 11,
        "skip_server_warmup": True,
        "incremental_streaming_output": True,
    }


def test_an_engine_that_gives_up_its_memory_captures_only_graphs_that_can_give_up_theirs():
    assert (
        server_args(spec(shared_gpus=("0",), rests=True)).items()
        >= {
            "enable_memory_saver": True,
            "enable_weights_cpu_backup": True,
            "cuda_graph_backend_prefill": "disabled",
        }.items()
    )


def test_an_engine_that_works_beside_the_trainer_keeps_its_memory():
    assert server_args(spec(port=30000, shared_gpus=("0",))) == server_args(spec(port=30000))


MEETING = MeetingPoint("10.0.0.1", 20_000)


def test_the_ranks_of_an_engine_are_split_as_the_recipe_says():
    arguments = server_args(
        spec(
            tensor_parallel=8,
            data_parallel=4,
            expert_parallel=8,
            pipeline_parallel=2,
            nodes=4,
            node=3,
            meeting=MEETING,
        )
    )
    assert (
        arguments.items()
        >= {
            "tp_size": 8,
            "dp_size": 4,
            "enable_dp_attention": True,
            "ep_size": 8,
            "pp_size": 2,
            "nnodes": 4,
            "node_rank": 3,
            "dist_init_addr": "10.0.0.1:20000",
        }.items()
    )


def test_each_node_of_an_engine_on_cpus_binds_its_own_ranks_to_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    for node in range(2):
        part = spec(device="cpu", tensor_parallel=2, nodes=2, node=node)
        assert cpu.environment(part.ranks, part.ranks_here)["SGLANG_CPU_OMP_THREADS_BIND"] == str(node)


def test_the_recipe_overrides_the_defaults_of_the_cpu_which_a_gpu_does_not_have():
    on_cpu = server_args(spec(device="cpu", args={"max_total_tokens": 99, "log_level": "info"}))
    assert on_cpu["attention_backend"] == "torch_native"
    assert on_cpu["max_total_tokens"] == 99
    assert on_cpu["log_level"] == "info"
    assert cpu.SERVER_ARGS["max_total_tokens"] != 99
    assert not cpu.SERVER_ARGS.keys() & server_args(spec()).keys()


def test_one_rank_on_a_cpu_is_not_bound_to_a_core(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/mine")
    variables = cpu.environment(1)
    assert variables["SGLANG_USE_CPU_ENGINE"] == "1"
    assert variables["CUDA_VISIBLE_DEVICES"] == ""
    assert "SGLANG_CPU_OMP_THREADS_BIND" not in variables
    first, *_, last = variables["PYTHONPATH"].split(os.pathsep)
    assert (first, last) == (str(cpu.STAND_INS / "common"), "/mine")


@pytest.mark.parametrize(("cores", "expected"), [({0, 1}, "0|1|0"), ({5, 2, 9, 7}, "2|5|7"), ({4}, "4|4|4")])
def test_several_ranks_on_a_cpu_have_a_core_each_as_far_as_there_are_cores(monkeypatch, cores, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: cores)
    assert cpu.environment(3)["SGLANG_CPU_OMP_THREADS_BIND"] == expected


def test_an_engine_on_a_cpu_does_not_import_the_models_that_it_does_not_serve(tmp_path):
    (tmp_path / "config.json").write_text('{"architectures": ["Qwen3ForCausalLM"]}')
    [names] = cpu.without_other_models(tmp_path).values()
    assert "qwen3" not in names.split(",")
    assert {"llama", "deepseek_v2", "qwen3_moe"} <= set(names.split(","))


@pytest.mark.parametrize("content", ['{"architectures": ["Unknown"]}', '{"architectures": null}', "{", None])
def test_all_models_are_imported_if_it_is_not_known_which_one_is_served(tmp_path, content):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    assert cpu.without_other_models(tmp_path) == {}


@pytest.mark.parametrize(
    ("origin", "installed"),
    [
        ("/site-packages/triton/__init__.py", True),
        (None, False),
        (str(cpu.STAND_INS / "triton_missing" / "triton" / "__init__.py"), False),
    ],
)
def test_triton_is_replaced_only_where_it_is_missing(monkeypatch, origin, installed):
    spec = ModuleSpec("triton", None, origin=origin) if origin else None
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    paths = cpu.environment(1)["PYTHONPATH"].split(os.pathsep)
    assert paths == [str(cpu.STAND_INS / name) for name in ["common"] + ["triton_missing"] * (not installed)]
    assert all(Path(path).is_dir() for path in paths)


def test_the_launcher_is_a_module_that_is_there():
    assert LAUNCHER[:2] == (sys.executable, "-m")
    assert importlib.util.find_spec(LAUNCHER[2]) is not None


# ---- start


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_server_is_started_with_its_arguments_and_found_healthy(tmp_path, monkeypatch, device):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # must not stand between us and the server
    monkeypatch.delenv("SGLANG_USE_CPU_ENGINE", raising=False)
    monkeypatch.setenv("SGLANG_PYSPY_DUMP_BEFORE_CRASH", "1")
    with started(tmp_path, device=device) as server:
        asyncio.run(healthy_then_stop(server))
        reported = report(tmp_path)
        assert reported["arguments"]["weight_version"] == "3"
        environment = reported["environment"]
        assert environment["SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"] == "0"
        assert environment["HF_HUB_OFFLINE"] == "1"
        assert environment["SGLANG_PYSPY_DUMP_BEFORE_CRASH"] == "1", "the user asks for it"
        assert environment["SGLANG_CUDA_COREDUMP_BEFORE_CRASH"] == "0"
        assert ("SGLANG_USE_CPU_ENGINE" in environment) == (device == "cpu")
        imports = [sys.executable, "-c", "import megatron"]
        refused = subprocess.run(imports, env=environment, capture_output=True, text=True, timeout=240)
        assert "ImportError: Megatron is hidden from engines" in refused.stderr
        assert server.access.url == f"http://127.0.0.1:{reported['arguments']['port']}"


async def healthy_then_stop(server: ServerProcess, *, stop: bool = True) -> None:
    """The thread that waits for the exit belongs to the event loop: it has to end with it."""
    try:
        await server.wait_healthy(60)
    finally:
        if stop:
            await asyncio.to_thread(server.stop)


def test_a_server_that_exits_while_starting_is_an_error_with_the_end_of_its_log(tmp_path):
    with started(tmp_path, "dies") as server:
        with pytest.raises(EngineStartError) as caught:
            asyncio.run(healthy_then_stop(server))
        assert "SGLang exited with code 1 while starting" in str(caught.value)
        assert str(caught.value).endswith("a line before\nthere is no such model\n")


def test_a_server_that_does_not_become_healthy_is_an_error_that_names_the_time(tmp_path):
    async def main(server):
        try:
            with pytest.raises(EngineStartError, match="SGLang was not healthy within 1 s; the end of"):
                await server.wait_healthy(0.6)
        finally:
            server.stop()

    with started(tmp_path, "unhealthy") as server:
        asyncio.run(main(server))


def test_the_reply_of_another_server_on_its_port_does_not_make_a_dead_server_healthy(tmp_path):
    seen = []

    async def reply(reader, writer):
        seen.append(await reader.readline())
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        writer.close()

    async def main():
        other = await asyncio.start_server(reply, "127.0.0.1", 0)
        port = other.sockets[0].getsockname()[1]
        with started(tmp_path, "dies", port=port) as server:
            await server.wait_exit()
            async with other:
                with pytest.raises(EngineStartError, match="exited with code 1"):
                    await server.wait_healthy(5)

    asyncio.run(main())
    assert not seen, "it could have asked for the key"


def test_whoever_else_listens_on_the_port_of_a_starting_server_does_not_see_its_key(tmp_path):
    seen = []

    async def reply(reader, writer):
        seen.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        writer.close()

    async def main():
        other = await asyncio.start_server(reply, "127.0.0.1", 0)
        port = other.sockets[0].getsockname()[1]
        with started(tmp_path, "slow", port=port) as server:
            async with other:
                with pytest.raises(EngineStartError, match="not healthy"):
                    await server.wait_healthy(1)

    asyncio.run(main())
    assert not seen


def test_each_start_has_a_key_of_its_own_which_no_other_user_can_read(tmp_path):
    keys = set()
    for number in range(2):
        with started(tmp_path / str(number)) as server:
            asyncio.run(healthy_then_stop(server, stop=False))
            key = server.access.key
            keys.add(key)
            assert key.encode() not in Path(f"/proc/{server.pid}/cmdline").read_bytes()
            assert key.encode() not in Path(f"/proc/{server.pid}/environ").read_bytes()
            assert key not in (tmp_path / str(number) / "logs/engine-0.log").read_text()
    assert len(keys) == 2


def test_the_servers_sockets_stay_on_its_interface_whatever_the_environment_says(tmp_path, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    monkeypatch.setenv("SGLANG_GRPC_PORT", "12345")
    with started(tmp_path) as server:
        asyncio.run(healthy_then_stop(server))
        environment = report(tmp_path)["environment"]
    assert (environment["GLOO_SOCKET_IFNAME"], environment["NCCL_SOCKET_IFNAME"]) == ("lo", "=lo")
    assert environment["SGLANG_HOST_IP"] == "127.0.0.1"
    assert "SGLANG_GRPC_PORT" not in environment, "its listener asks for no key"


def test_the_exit_of_a_server_is_noticed(tmp_path):
    async def main(server):
        waiting = [asyncio.create_task(server.wait_exit()) for _ in range(2)]
        await server.wait_healthy(60)
        assert not any(task.done() for task in waiting)
        os.kill(server.pid, signal.SIGKILL)
        assert await asyncio.wait_for(asyncio.gather(*waiting), 60) == [-9, -9]

    with started(tmp_path) as server:
        asyncio.run(main(server))


OTHER_NODE = {"tensor_parallel": 2, "nodes": 2, "node": 1, "meeting": MEETING}


def test_a_server_of_another_node_is_ready_when_it_says_so_and_listens_on_nothing(tmp_path):
    async def main(server):
        await server.wait_healthy(60)
        listening = {c for c in psutil.Process(server.pid).net_connections() if c.status == "LISTEN"}
        assert not listening

    with started(tmp_path, **OTHER_NODE) as server:
        asyncio.run(main(server))
    never = pytest.raises(EngineStartError, match="not healthy within 1 s")
    with started(tmp_path, "unhealthy", **OTHER_NODE) as server, never:
        asyncio.run(server.wait_healthy(0.6))


@pytest.mark.parametrize("split", [OTHER_NODE, {"tensor_parallel": 2, "data_parallel": 2}])
def test_processes_that_sglang_does_not_watch_take_their_server_with_them(tmp_path, split):
    async def main(server):
        await server.wait_healthy(60)
        child = report(tmp_path)["child"]
        os.kill(child, signal.SIGKILL)
        assert await asyncio.wait_for(server.wait_exit(), 60) == -9

    with started(tmp_path, **split) as server:
        asyncio.run(main(server))


def test_a_process_that_sglang_watches_is_left_to_sglang(tmp_path):
    async def main(server):
        await server.wait_healthy(60)
        os.kill(report(tmp_path)["child"], signal.SIGKILL)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(server.wait_exit(), 0.3)

    with started(tmp_path) as server:
        asyncio.run(main(server))


def test_the_log_of_an_earlier_server_is_kept(tmp_path):
    for _ in range(2):
        with started(tmp_path, "dies") as server, pytest.raises(EngineStartError):
            asyncio.run(healthy_then_stop(server))
    assert (tmp_path / "logs/engine-0.log").read_text().count("there is no such model") == 2


def test_processes_that_hang_write_their_stacks_and_one_that_is_stopped_is_named(tmp_path):
    """Neither SGLang nor the program that has no handler is ended by being asked."""

    async def main(server):
        await server.wait_healthy(60)
        [forked] = set(psutil.Process(server.pid).children()) - {psutil.Process(report(tmp_path)["child"])}
        assert server.write_stacks() == []
        written = server.stacks.read_text()
        assert written.count("the server (process ") == 2
        assert written.count("most recent call first") >= 2
        os.kill(forked.pid, signal.SIGSTOP)
        wait_until(lambda: forked.status() == psutil.STATUS_STOPPED)
        assert server.write_stacks() == [f"the server (process {forked.pid}) is stopped by a signal"]
        assert alive(report(tmp_path)["child"])

    with started(tmp_path, "shows") as server:
        asyncio.run(main(server))
        assert server.stacks == tmp_path / "logs/stacks/engine-0.txt"


# ---- end


def test_stopping_ends_the_whole_group_and_its_shared_memory_and_may_be_repeated(tmp_path):
    with started(tmp_path) as server:
        wait_until(lambda: (tmp_path / "logs/engine-0.log").read_text().endswith("\n"))
        child, temporary = report(tmp_path)["child"], Path(report(tmp_path)["temporary"])
        assert alive(server.pid)
        assert list(temporary.iterdir()) == []
        assert alive(child)
        assert shared_memory(server.pid).exists()
        server.stop()
        assert not alive(server.pid)
        wait_until(lambda: not alive(child))
        assert not shared_memory(server.pid).exists()
        assert not temporary.exists()
        server.stop()


def test_stopping_ends_the_children_of_a_server_that_died(tmp_path):
    async def main(server):
        await server.wait_healthy(60)
        os.kill(server.pid, signal.SIGKILL)
        await server.wait_exit()

    with started(tmp_path) as server:
        asyncio.run(main(server))
        child = report(tmp_path)["child"]
        assert alive(child)
        server.stop()
        wait_until(lambda: not alive(child))
        assert not shared_memory(server.pid).exists()


OWNER = textwrap.dedent(
    """
    import sys, time
    from pathlib import Path
    from slipstream.rollout.engine.server_process import ServerProcess, ServerSpec

    folder, port = Path(sys.argv[1]), int(sys.argv[2])
    spec = ServerSpec(Path("m"), "float32", "cuda", 1, "127.0.0.1", port, 0, 0)
    launcher = (sys.executable, str(folder / "stand_in.py"), "launched")
    server = ServerProcess(spec, folder / "logs/engine-0.log", launcher)
    print(server.pid, flush=True)
    time.sleep(300)
    """
)


def test_the_group_ends_with_its_owner_even_by_kill_9(tmp_path):
    (tmp_path / "stand_in.py").write_text(STAND_IN)
    (tmp_path / "owner.py").write_text(OWNER)
    variables = environment()
    command = [sys.executable, str(tmp_path / "owner.py"), str(tmp_path), str(held_port())]
    with subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, text=True) as owner:
        try:
            server = int(owner.stdout.readline())
            log = tmp_path / "logs/engine-0.log"
            wait_until(lambda: log.exists() and log.read_text().endswith("\n"))
            child = report(tmp_path)["child"]
            time.sleep(0.1)
            assert alive(server), "it must live as long as its owner does"
            assert alive(child)
        finally:
            owner.kill()
        wait_until(lambda: not alive(server) and not alive(child))
        wait_until(lambda: not shared_memory(server).exists())
        assert not Path(report(tmp_path)["temporary"]).exists()


# ---- the program


CACHE = textwrap.dedent(
    """
    import os, sys
    from slipstream.rollout.engine.launch import _use_for_temporary_files
    os.geteuid = lambda: int(sys.argv[2])
    _use_for_temporary_files(sys.argv[1])
    print(os.environ.get("TORCHINDUCTOR_CACHE_DIR"), os.environ["TMPDIR"])
    """
)


@pytest.mark.parametrize(("stranger", "kept"), [(0, True), (1, False)], ids=["mine", "another user's"])
def test_compiled_code_is_read_from_a_folder_of_this_user_only(tmp_path, stranger, kept):
    """The folder has a name that everybody can guess, in a folder where everybody may make one."""
    variables = environment(TMPDIR=str(tmp_path))
    variables.pop("TORCHINDUCTOR_CACHE_DIR", None)
    command = [sys.executable, "-c", CACHE, str(tmp_path / "own"), str(os.geteuid() + stranger)]
    said = subprocess.run(command, env=variables, capture_output=True, text=True, check=True).stdout.split()
    [cache] = tmp_path.glob("torchinductor_*")
    assert said == [str(cache) if kept else "None", str(tmp_path / "own")]
    assert cache.stat().st_mode & 0o777 == 0o700
