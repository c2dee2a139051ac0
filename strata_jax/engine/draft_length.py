"""How many drafts pay: from what windows cost and how often drafts come true. Imports no jax."""

import collections
import statistics

_REMEMBERED = 8
"""Windows of one width whose time is looked at: the median of them is what such a window costs."""
_COST_OF_ROW = 0.15
"""Of a window of one row, for each row more; believed until windows have been timed."""
_FORGET = 0.9
"""What earlier drafts count beside the next one in the same place."""
_HOPE = 0.7
"""Chance of a draft before anything is known; as much as one draft seen."""
_PAYING = 16
"""Windows with drafts after which an earlier pause is forgotten."""
_FIRST_PAUSE = 32
_LONGEST_PAUSE = 512
_EXPLORE = 8
"""Of so many windows one has a draft more than seems best: nothing else tells of drafts never made."""
_PROBE = 2
"""Drafts of a window that finds out whether they pay again."""
_SETTLING = 3
"""Windows without drafts whose time does not count, after one with drafts: a device that is kept a step ahead
of the host is not yet, then, and would seem slower without drafts than it is."""
_COLD = 8
"""The first windows of all, whose time does not count: a machine that has just begun is slower."""
_COLD_DRAFTS = 8
"""The first windows whose drafter was asked, which do not count at all: what runs for the first times takes two or
three times as long, and a pause would follow that hides for long how well drafts do."""
_STALE, _LOOK = 96, 8
"""After so many windows with drafts some are made without, to see what those cost by now: else what seemed too
dear once would be believed for ever."""
_SURE, _RARELY = 1.5, 4
"""Where drafts make ids that many times as fast, one looks so many times more rarely."""
_JUDGED, _JUDGED_AGAIN = 6, 2
"""Windows whose drafter was asked, before their time alone decides; soon after a pause."""


class DraftLength:
    """Chooses the number of drafts that gives most ids a second; none while they do not pay.

    Live rows are all that it changes, so answers do not depend on its clock. A pause soon after another is
    twice as long, up to 512 windows; then one window with drafts finds out.
    """

    def __init__(self, most: int):
        """`most`: drafts of a window."""
        self._offered = [1.0] * most
        self._came_true = [_HOPE] * most
        self._seconds: dict[int, collections.deque[float]] = {}
        self._pause = _FIRST_PAUSE
        self._since_pause = _PAYING
        self._probing = False
        self._looking = False  # the pause is one to look what windows without drafts cost
        self._unlooked = 0  # windows with drafts since one without was timed
        self._settling = _COLD
        self._undrafted = 0  # windows without drafts since the last one with drafts
        self._cold_drafts = _COLD_DRAFTS  # still to come
        self._asked = 0  # windows whose drafter was asked
        self._asked_ids = self._asked_s = 0.0  # what they gave and took, the latest counting most
        self.paused = 0
        """Windows without drafts that are still to come."""

    @property
    def is_probing(self) -> bool:
        """Whether the next window with drafts, and no other, finds out if they pay again."""
        return self._probing

    def choose(self, room: int) -> tuple[int, float]:
        """The number of drafts for the next window, and its speed against one without.

        Args:
            room: drafts that the window may have.
        """
        if self.paused > 0 or room <= 0 or len(self._seconds.get(0, ())) < _REMEMBERED:
            return 0, 0.0
        if self._probing:
            count = min(_PROBE, room, len(self._offered))
            return count, self._speed(count)
        count, speed = self._best(room)
        if count > 0 and self._since_pause % _EXPLORE == 0:
            count = min(count + 1, room, len(self._offered))
        return count, speed

    def seen(self, drafts: int, came_true: int, seconds: float, *, asked: bool = False) -> bool:
        """Takes note of a window: its drafts, those that came true, and its time.

        Args:
            drafts: 0 also where the drafter was asked in vain.
            came_true: of them.
            seconds: with the drafter's time.
            asked: whether the drafter was asked; sure if there are drafts.

        Returns:
            whether a pause begins.
        """
        if (asked or drafts > 0) and self._cold_drafts > 0:
            self._cold_drafts -= 1
            return False
        if asked or drafts > 0:
            self._asked += 1
            self._asked_ids = _FORGET * self._asked_ids + came_true + 1
            self._asked_s = _FORGET * self._asked_s + seconds
        if drafts == 0 and asked:
            return self._asked_in_vain()
        self._undrafted = self._undrafted + 1 if drafts == 0 else 0
        if drafts > 0 or self._undrafted > self._settling:
            self._settling = _SETTLING
            self._unlooked = self._unlooked + 1 if drafts else 0
            times = self._seconds.setdefault(drafts, collections.deque(maxlen=_REMEMBERED))
            times.append(seconds)
        if drafts == 0:
            self._probing |= self.paused == 1 and not self._looking
            self.paused = max(0, self.paused - 1)
            self._looking &= self.paused > 0
            return False
        for place in range(min(came_true + 1, drafts)):
            self._offered[place] = _FORGET * self._offered[place] + 1
            self._came_true[place] = _FORGET * self._came_true[place] + (place < came_true)
        self._probing = False
        self._since_pause += 1
        if self.paused > 0:  # a device had this window in its queue
            return False
        _, speed = self._best(len(self._offered))
        if speed > 1 and not self._loses():
            stale = _STALE if speed < _SURE else _RARELY * _STALE
            self._looking = self._unlooked >= stale
            self.paused = _LOOK if self._looking else 0
            return False
        self._begin_pause()
        return True

    def _asked_in_vain(self) -> bool:
        """A window without drafts, but with the time of a drafter that found none likely enough."""
        self._undrafted, self._probing = 0, False
        self._since_pause += 1
        if not self._loses():
            return False
        self._begin_pause()
        return True

    def _loses(self) -> bool:
        """Whether windows whose drafter was asked gave fewer ids a second than others, drafts or not."""
        enough = _JUDGED if self._since_pause > _PAYING else _JUDGED_AGAIN
        if self._asked < enough or 0 not in self._seconds:
            return False
        return self._asked_ids * self._cost(0) <= self._asked_s

    def _begin_pause(self) -> None:
        self._asked, self._asked_ids, self._asked_s = 0, 0.0, 0.0
        again = self._since_pause < _PAYING
        self._pause = min(2 * self._pause, _LONGEST_PAUSE) if again else _FIRST_PAUSE
        self.paused, self._since_pause = self._pause, 0
        self._cold_drafts = 1  # that window's drafter reads what it has missed first
        # The text may be another one by then: what was seen counts as much as one draft.
        self._came_true = [t / n for t, n in zip(self._came_true, self._offered)]
        self._offered = [1.0] * len(self._offered)

    def _best(self, room: int) -> tuple[int, float]:
        counts = range(1, min(room, len(self._offered)) + 1)
        speeds = [(self._speed(count), -count) for count in counts]
        speed, count = max(speeds)
        return (-count, speed) if speed > 1 else (0, speed)

    def _speed(self, drafts: int) -> float:
        """Ids of a window with so many drafts, over its time in windows without."""
        ids = chance = 1.0
        for place in range(drafts):
            chance *= self._came_true[place] / self._offered[place]
            ids += chance
        return ids * self._cost(0) / self._cost(drafts)

    def _cost(self, drafts: int) -> float:
        if drafts in self._seconds:
            return statistics.median(self._seconds[drafts])
        base = statistics.median(self._seconds[0])
        known = [count for count in self._seconds if count > 0]
        if not known:
            return base * (1 + _COST_OF_ROW * drafts)
        nearest = min(known, key=lambda count: abs(count - drafts))
        more = statistics.median(self._seconds[nearest]) - base
        return base + max(0.0, more) * drafts / nearest
