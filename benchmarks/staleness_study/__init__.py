"""Learning under staleness: the same small policy trained on batches of every lag, by every method.

    python -m benchmarks.staleness_study            # the runs that docs/ has no result of, then the report
    python -m benchmarks.staleness_study --report   # table and figure from what there is
    python -m benchmarks.staleness_study --quick    # a minute: does it work

    sampler      plays the engine: answers and their log-probs from a fixed copy of the policy
    trainer      a training step of the shipped objective, on a transformers model
    methods      what is compared, and which version samples which batch
    study        a run, and a sweep over runs
    __main__     which runs: settings, seeds, cells
    report       tables with confidence intervals; figure: the picture

docs/staleness_study.md says what was found.
"""
