"""CPU of the episode log on the ranks that write it: in the step, and in the thread beside it.

    python -m benchmarks.episode_log --episodes 512 --tokens 1024

One rank trains groups of 8 episodes. The first figure is what a training step pays, which copies arrays; the
second is what the thread pays for text, JSON and files. The driver writes nothing: the last figure is what it
pays, once a minute, to read some episodes for TensorBoard.
"""

import shutil
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from benchmarks.harness import parser
from slipstream.backend.batch.micro_batch import assemble
from slipstream.backend.batch.train_batch import TrainBatch
from slipstream.backend.monitor.sample_episodes import EpisodeSamples
from slipstream.backend.quickstart.tokenizer import build_tokenizer
from slipstream.backend.trainer.episode_log import StepLogProbs, chosen_episodes
from slipstream.backend.trainer.prepared import PreparedMicroBatch, Scores, Targets
from slipstream.rollout.ledger.episode_log.files import EpisodeFiles, episode_files
from slipstream.rollout.ledger.episode_log.rows import episode_row
from slipstream.rollout.ledger.episode_log.token_text import TokenText, load_decoder
from slipstream.rollout.tokens.trajectory import Completion, Finish, Span, TrajectoryBuilder

STEPS = 5
PACK = 16
"""Episodes of a micro-batch."""


def prepared_step(episodes: int, tokens: int) -> tuple[TrainBatch, list[list[PreparedMicroBatch]]]:
    """Return a step as a rank has it at its end."""
    rng = np.random.default_rng(0)
    trajectories = []
    for _ in range(episodes):
        ids = rng.integers(5, 20, tokens).tolist()
        builder = TrajectoryBuilder([5] * 32)
        half = tokens // 2
        spans = (Span(3, 0, half), Span(4, half, tokens))
        builder.add_completion(Completion(tuple(ids), (-0.5,) * tokens, spans, Finish.STOP))
        trajectories.append(builder.build())
    batch = TrainBatch(4, tuple(trajectories), np.arange(episodes) // 8)
    minibatch = []
    for first in range(0, episodes, PACK):
        micro = assemble(batch, list(range(first, min(first + PACK, episodes))))
        logp_M = torch.full((len(micro.target_M),), -0.49)
        minibatch.append(PreparedMicroBatch(micro, Scores(logp_M, None, None, None), Targets(logp_M, None)))
    return batch, [minibatch]


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--episodes", type=int, default=512)
    options.add_argument("--tokens", type=int, default=1024)
    given = options.parse_args()
    batch, minibatches = prepared_step(given.episodes, given.tokens)
    scratch = Path(tempfile.mkdtemp())
    build_tokenizer().save_pretrained(scratch)
    text = TokenText(load_decoder(scratch))
    print(f"{given.episodes} episodes of {given.tokens} tokens a step; ms of CPU a step, median of {STEPS}")
    print("share  most tokens   in the step   in the thread   MiB written")
    for share, most in ((1.0, 2048), (1.0, 0), (0.1, 2048)):
        folder = scratch / f"{share}-{most}"
        files = EpisodeFiles(folder / "episodes", writer=0, writers=1, max_bytes=2**30, max_rows=10**6)
        inside, beside = [], []
        for step in range(1, STEPS + 1):
            begin = time.process_time()
            episodes = list(chosen_episodes(batch, minibatches, StepLogProbs(), share))
            copied = time.process_time()
            files.append(step, [episode_row(episode, text, most) for episode in episodes])
            inside.append(copied - begin)
            beside.append(time.process_time() - copied)
        size = sum(path.stat().st_size for path in episode_files(folder)) / STEPS / 2**20
        inside_ms, beside_ms = (1000 * float(np.median(values)) for values in (inside, beside))
        print(f"{share:5.2f}  {most:11}   {inside_ms:11.1f}   {beside_ms:13.1f}   {size:11.2f}")
    begin = time.process_time()
    EpisodeSamples(scratch / "1.0-2048").metrics()
    print(f"driver: {1000 * (time.process_time() - begin):.1f} ms of CPU to read some episodes")
    shutil.rmtree(scratch)


if __name__ == "__main__":
    main()
