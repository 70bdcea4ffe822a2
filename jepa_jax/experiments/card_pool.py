"""Runs jobs on several cards of one host at once: one job per card, the next one where a card gets free."""

import queue
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

Job = TypeVar("Job")
Outcome = TypeVar("Outcome")
TICK_SECONDS = 0.5


class Stopped(Exception):
    """Raised in a job's thread when the pool is to end."""


def run_on_cards(
    cards: Sequence[int],
    take: Callable[[int], Job | None],
    run: Callable[[Job, int, Callable[[], None]], Outcome],
    keep: Callable[[Job, Outcome], None],
    tick: Callable[[], None] = lambda: None,
) -> None:
    """Runs jobs until there are no more; jobs run in threads, everything else in the caller's.

    An exception, of a job or a signal, stops the other jobs before it is raised.

    Args:
      take: returns the next job for a card, or None if there is none at the moment; asked again after each job.
      run: runs a job on a card; it calls its last argument now and then, which raises Stopped when it is to end.
      keep: takes what a job has returned.
      tick: called about twice per second.
    """
    ended: queue.SimpleQueue[tuple[int, Job, Outcome | BaseException]] = queue.SimpleQueue()
    stop = threading.Event()
    threads: dict[int, threading.Thread] = {}

    def check() -> None:
        if stop.is_set():
            raise Stopped

    def work(card: int, job: Job) -> None:
        try:
            ended.put((card, job, run(job, card, check)))
        except BaseException as error:  # raised again in the caller's thread
            ended.put((card, job, error))

    try:
        while True:
            for card in [card for card in cards if card not in threads]:
                job = take(card)
                if job is not None:
                    threads[card] = threading.Thread(target=work, args=(card, job), name=f"card-{card}", daemon=True)
                    threads[card].start()
            if not threads:
                return
            try:
                card, finished, outcome = ended.get(timeout=TICK_SECONDS)
            except queue.Empty:
                tick()
                continue
            threads.pop(card).join()
            if isinstance(outcome, BaseException):
                raise outcome
            keep(finished, outcome)
    finally:
        stop.set()
        for thread in threads.values():
            thread.join()
