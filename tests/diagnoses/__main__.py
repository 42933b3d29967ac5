"""Makes every run, prints its diagnosis, and saves its evidence for the unit test.

With names of cases, only those are made. ``--keep FOLDER``: where runs stay, and are read if they are there.
"""

import argparse
import sys
import tempfile
from pathlib import Path

from slipstream.backend.commands.diagnose import diagnose
from slipstream.backend.monitor.diagnosis.causes import likely_causes
from slipstream.backend.monitor.diagnosis.evidence import read_evidence
from tests.diagnoses.cases import BROKEN, HEALTHY, Case
from tests.diagnoses.runs import folder_name, make_inputs, make_run
from tests.diagnoses.saved import SAVED, line_of

FIRST = 2
"""A cause is named if it is among so many."""


def problem_of(case: Case, named: list[str]) -> str | None:
    """Return what is wrong with the causes that a diagnosis names; None: nothing."""
    if not case.causes:
        return f"named {', '.join(named)}, expected nothing" if named else None
    if set(case.causes) & set(named[:FIRST]):
        return None
    return (
        f"named {', '.join(named) or 'nothing'}, expected {' or '.join(case.causes)} among the first {FIRST}"
    )


def main() -> int:
    """Return the exit code: 0 if every cause was named, and no healthy run had one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--keep", type=Path)
    options = parser.parse_args()
    cases = [case for case in (*BROKEN, *HEALTHY) if not options.names or case.name in options.names]
    with tempfile.TemporaryDirectory() as scratch:
        root = (options.keep or Path(scratch)).resolve()
        root.mkdir(parents=True, exist_ok=True)
        lines, problems = [], dict.fromkeys((case.name for case in cases), None)
        make_inputs(root / "inputs")
        for case in cases:
            run = root / folder_name(case)
            if not (run / "metrics.jsonl").exists():
                make_run(case, root / "inputs", root)
            evidence = read_evidence(run)
            problems[case.name] = problem_of(case, [each.cause.name for each in likely_causes(evidence)])
            lines.append(line_of(case.name, evidence, root))
            show(case, diagnose(run), problems[case.name])
    if not options.names:
        SAVED.write_text("\n".join(lines) + "\n", encoding="utf-8")
    broken = [case for case in cases if case.causes]
    named = sum(problems[case.name] is None for case in broken)
    alarms = sum(problems[case.name] is not None for case in cases if not case.causes)
    print(f"named {named} of {len(broken)}, alarms {alarms}")
    return int(any(problems.values()))


def show(case: Case, diagnosis: str, problem: str | None) -> None:
    """Print the diagnosis of a run, and what is wrong with it."""
    print(f"{'WRONG' if problem else 'right'}  {case.name}")
    print("".join(f"    {line}\n" for line in diagnosis.splitlines()), end="")
    print(f"    !! {problem}\n" if problem else "", end="", flush=True)


if __name__ == "__main__":
    sys.exit(main())
