"""The scripted users' way of exchanging words: as many are said of each kind, by whoever it may be."""

import asyncio
import random
from collections import Counter

from benchmarks.quickstart_users import THANKS, WRONG, Shuffle


def test_shuffled_words_keep_their_rates_and_mean_nothing():
    users, rounds, right = 8, 400, 3

    async def main() -> Counter[tuple[int, str]]:
        shuffle, said = Shuffle(random.Random(1), users), Counter[tuple[int, str]]()
        for _ in range(rounds):
            words = [THANKS if user < right else WRONG for user in range(users)]
            heard = await asyncio.gather(*map(shuffle.exchange, words))
            assert sorted(heard) == sorted(words)
            said.update(enumerate(heard))
        return said

    said = asyncio.run(main())
    rates = [said[user, THANKS] / rounds for user in range(users)]
    assert all(abs(rate - right / users) < 0.1 for rate in rates), rates


def test_a_user_that_has_left_takes_no_word_along():
    async def main():
        shuffle = Shuffle(random.Random(1), 3)
        gone = asyncio.ensure_future(shuffle.exchange(THANKS))
        waiting = asyncio.ensure_future(shuffle.exchange(THANKS))
        await asyncio.sleep(0)
        gone.cancel()
        assert await shuffle.exchange(THANKS) == await waiting == THANKS

    asyncio.run(main())
