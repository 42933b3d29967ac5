"""Learning under staleness: the same small policy trained on batches of every lag, by every method.

    python -m benchmarks.staleness_study            # runs without a result in results.jsonl, then the report
    python -m benchmarks.staleness_study --report   # tables and figure of the existing results
    python -m benchmarks.staleness_study --quick    # one minute, to see that it works

    sampler      takes the place of the engine: completions and log-probs from a fixed copy of the policy
    trainer      a training step with the product's objective, on a transformers model
    methods      the methods that are compared, and the version that samples each batch
    study        one run
    workers      processes that do jobs; sweep: the runs that the results lack, done by workers
    __main__     the settings, seeds and cells of the study
    report       tables with confidence intervals; figure: the pictures

README.md has the tables, docs/staleness_study.md the conclusions.
"""
