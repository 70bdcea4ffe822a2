"""Which trial a free card takes: every combination meets every card before it meets one of them again."""

import random

from hypothesis import given
from hypothesis import strategies as st

from jepa_jax.experiments.sweep import next_job


@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 5), st.integers(0, 2**32))
def test_combinations_meet_all_cards_however_slow_one_of_them_is(combinations, num_cards, rounds, seed):
    cards, order = range(num_cards), random.Random(seed)
    used, meetings = set(), {(c, card): 0 for c in range(combinations) for card in cards}
    open_jobs = [(c, number) for number in range(rounds) for c in range(combinations)]
    idle = 0
    while open_jobs:
        card = order.choice(cards)  # that happens to be free
        of_round = [job for job in open_jobs if job[1] == open_jobs[0][1]]
        job = next_job(of_round, card, cards, used)
        if job is None:
            idle += 1
            assert idle < 10_000  # some card always has a job
            continue
        open_jobs.remove(job)
        used.add((job[0], card))
        meetings[job[0], card] += 1
    for c in range(combinations):
        met = [meetings[c, card] for card in cards]
        assert sum(met) == rounds
        assert rounds > num_cards or max(met) == 1
