"""Agents as their users install them, caged to loopback, in five scenes each.

    python -m tests.cli_agents [--only codex] [--scene tool] [--wire FOLDER]

In each scene the agent talks to a gateway of its own. Afterwards everything must be one conversation, each
answer must have the next state that followed it, and what is trained must be what was sampled. The last line
is `N passed, N failed`; the exit code is 1 if anything has failed. `make test-agents` installs the agents.
"""

import argparse
import asyncio
import fcntl
import json
import logging
import os
import shutil
import signal
import socket
import struct
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from slipstream.rollout.engine.server_process import let_import_sglang
from tests.cli_agents.agents import AGENTS, SCENES, Agent
from tests.environment import ROOT

INSTALLED = Path(sys.prefix) / "agents"
COMMAND_S = 120.0
"""Longest time of one command of an agent."""

INTERFACE_FLAGS, UP = 0x8914, 0x1 | 0x40
"""``SIOCSIFFLAGS``, and ``IFF_UP | IFF_RUNNING``."""


def enter_cage() -> None:
    """Start this program again in a network of its own, which has loopback alone."""
    if "--caged" in sys.argv:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            fcntl.ioctl(any_socket, INTERFACE_FLAGS, struct.pack("16sh14x", b"lo", UP))
        return
    if shutil.which("unshare") is None:
        sys.exit("agents are caged by `unshare`, which is not here: install util-linux")
    rights = () if os.geteuid() == 0 else ("--user", "--map-root-user")
    again = (sys.executable, "-m", "tests.cli_agents", *sys.argv[1:], "--caged")
    # What agents leave running ends with the first process of this name space.
    os.execvp(
        "unshare", ["unshare", *rights, "--net", "--pid", "--fork", "--kill-child", "--mount-proc", *again]
    )


def script_of(agent: Agent, scene: str) -> tuple[dict[str, Any], list[list[str]]]:
    """Return what the policy answers in a scene, and the commands."""
    from tests.cli_agents.world import Step

    def said(command: Any, word: str) -> list[str]:
        return [part.replace("PROMPT", f"Please do this now: SAY-{word}") for part in command]

    match scene:
        case "chat":
            return {"hello": Step()}, [said(agent.talk, "hello")]
        case "tool":
            assert agent.echo is not None
            call = agent.echo("SAY-done")
            steps = {"call": Step(lambda _: [call], then="SAY-done"), "done": Step()}
            return steps, [said(agent.talk, "call")]
        case "resume":
            steps = {"one": Step(then="SAY-two"), "two": Step()}
            return steps, [said(agent.talk, "one"), said(agent.again, "two")]
        case "compaction":
            steps = {"first": Step(then="SAY-more"), "more": Step(then="SAY-last"), "last": Step()}
            begin = [
                f"{part} {'blah ' * agent.much}" if "SAY-" in part else part
                for part in said(agent.talk, "first")
            ]
            if agent.goes_on:
                steps["first"] = Step(then=agent.goes_on, follow="noted")
                steps["noted"] = Step(then="SAY-more")
            compact = [list(agent.compact)] if agent.compact else []
            end = said(agent.compacted or agent.again, "last")
            return steps, [begin, said(agent.again, "more"), *compact, end]
        case _:
            assert agent.delegate is not None
            calls = [agent.delegate(f"Please do this now: SAY-{word}") for word in ("left", "right")]
            steps = {
                "parent": Step(lambda _: calls, then="SAY-joined"),
                "left": Step(says="SAY-joined", is_apart=True),
                "right": Step(says="SAY-joined", is_apart=True),
                "joined": Step(),
            }
            if (collect := agent.collect) is not None:
                steps["parent"] = Step(lambda _: calls, then="agent_id", follow="waiting")
                steps["waiting"] = Step(lambda started: [collect(started)], then="SAY-joined")
            return steps, [said(agent.talk, "parent")]


async def run_command(command: list[str], agent: Agent, home: Path, url: str) -> str:
    """Run a command of an agent, and return what is wrong with its end; empty: nothing."""
    path = [INSTALLED / "bin", INSTALLED / "node/node_modules/.bin", "/usr/bin", "/bin"]
    variables = {
        "HOME": str(home),
        "PATH": os.pathsep.join(map(str, path)),
        "LANG": "C.UTF-8",
        "NO_PROXY": "127.0.0.1",
        **{name: value.replace("GATEWAY", url) for name, value in agent.env.items()},
    }
    process = await asyncio.create_subprocess_exec(
        *(part.replace("GATEWAY", url) for part in command),
        cwd=home / "work",
        env=variables,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(COMMAND_S):
            output, _ = await process.communicate()
    except TimeoutError:
        return f"`{command[0]}` has not ended within {COMMAND_S:.0f} s"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
    text = output.decode(errors="replace")
    return f"`{command[0]}` has ended with {process.returncode}: {text[-1500:]}" if process.returncode else ""


def end_left(home: Path) -> None:
    """End what an agent has left running: all processes with its home folder."""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if f"HOME={home}".encode() in (process / "environ").read_bytes().split(b"\0"):
                os.kill(int(process.name), signal.SIGKILL)


async def play(agent: Agent, scene: str, folder: Path, wire: Path | None) -> tuple[list[str], str]:
    """Play a scene. Return what was wrong, and what was seen."""
    from tests.cli_agents.world import World

    script, commands = script_of(agent, scene)
    home = folder / "home"
    (home / "work").mkdir(parents=True)
    world = World(folder, script, tools=agent.echo is not None)
    url = await world.start()
    for name, content in agent.files.items():
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text(content.replace("GATEWAY", url))
    wrong: list[str] = []
    try:
        for command in ([list(agent.before)] if agent.before else []) + commands:
            if not wrong and (problem := await run_command(command, agent, home, url)):
                wrong.append(problem)
        await world.stop()
    finally:
        end_left(home)
        if wire is not None:
            write_wire(wire / f"{agent.name}-{scene}.jsonl", world.wire)
    findings = world.oracle.findings
    return wrong + world.wrong(list(script)), (
        f"{len(world.wire)} requests, {findings.turns_trained} turns and {findings.tokens_trained} tokens "
        f"trained, branches {world.branches}"
    )


def write_wire(path: Path, wire: list[dict[str, Any]]) -> None:
    """Write every request and its reply."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = (
        json.dumps(
            {
                name: value.decode(errors="replace") if isinstance(value, bytes) else value
                for name, value in each.items()
            }
        )
        for each in wire
    )
    path.write_text("".join(f"{line}\n" for line in lines))


async def play_all(agents: list[Agent], scenes: list[str], wire: Path | None) -> int:
    passed = failed = 0
    for agent in agents:
        for scene in scenes:
            if scene in agent.cannot:
                print(f"none    {agent.name}: {scene}: {agent.cannot[scene]}", flush=True)
                continue
            with tempfile.TemporaryDirectory(prefix="cli-agents-", ignore_cleanup_errors=True) as folder:
                try:
                    wrong, seen = await play(agent, scene, Path(folder), wire)
                except Exception as error:
                    logging.exception("%s: %s", agent.name, scene)
                    wrong, seen = [repr(error)], ""
            passed, failed = passed + (not wrong), failed + bool(wrong)
            print(f"{'FAILED' if wrong else 'passed'}  {agent.name}: {scene}: {seen}", flush=True)
            for problem in wrong:
                print(f"        {problem}", flush=True)
    print(f"{passed} passed, {failed} failed", flush=True)
    return int(failed > 0)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=[agent.name for agent in AGENTS], help="only this agent")
    parser.add_argument("--scene", choices=SCENES, help="only this scene")
    parser.add_argument("--wire", type=Path, help="folder for every request and reply")
    parser.add_argument("--caged", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    enter_cage()
    os.chdir(ROOT)
    logging.basicConfig(level=logging.ERROR)
    let_import_sglang()
    agents = [agent for agent in AGENTS if arguments.only in (None, agent.name)]
    scenes = [scene for scene in SCENES if arguments.scene in (None, scene)]
    import uvloop  # SGLang makes its policy that of the process; asyncio's loop starts no program under it

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        sys.exit(runner.run(play_all(agents, scenes, arguments.wire)))


if __name__ == "__main__":
    main()
