"""How many drafts pay: from what windows cost and how often drafts come true. Imports no jax."""

import collections
import statistics

_REMEMBERED = 16
"""Windows of one kind whose time is looked at."""
_KNOWN = 8
"""The same without drafts; so many are timed before there are any."""
_COST_OF_ROW = 0.15
"""Of a window of one row, for each draft; believed until windows have been timed."""
_FORGET = 0.95
"""What earlier drafts count beside the next one in the same place."""
_HOPE, _HOPED = 0.7, 2.0
"""Chance of a draft before anything is known; as much as so many drafts seen."""
_EXPLORE = 8
"""Of so many windows one has a draft more than seems best: nothing else tells of drafts never made."""
_SETTLING, _SETTLING_AHEAD = 1, 3
"""Windows without drafts whose time does not count, after one with drafts. They would seem slower than they
are: a processor's caches are full of the draft layer (on the CPU, the embedded model: the first one takes
1.23 times as long as the third); a device is kept a step ahead of the host, but not yet then."""
_COLD = 8
"""The first windows of all, whose time does not count: a machine that has just begun is slower."""
_COLD_DRAFTS = 8
"""The first windows whose drafter was asked, which do not count at all: what runs for the first times takes two or
three times as long, and a pause would follow that hides for long how well drafts do."""
_STALE, _LOOK = 24, 4
"""After so many windows with drafts some are made without, to see what those cost by now: a machine that has
other work is now slow, now fast, and what seemed too dear once would be believed for ever."""
_STALE_AHEAD, _LOOK_AHEAD = 96, 8
"""The same on a device, which loses some time whenever it falls behind."""
_SURE, _RARELY = 1.5, 4
"""Where drafts make ids that many times as fast, one looks so many times more rarely."""
_GRANT = 4.0
"""What drafts may lose before they pause, in windows without drafts."""
_GRANT_AGAIN, _GRANT_AGAIN_AHEAD = 0.25, 2.0
"""The same after a pause: one window tells enough where the next pause may be short; a device loses more by
beginning and ending than by some windows more."""
_SAVED = 6.0
"""Most that they may lose after they have won more than that."""
_OUTLIER = 4.0
"""A window does not count for more time than so many without drafts take: the machine was busy."""
_SHARE, _SHARE_AHEAD = 0.03, 0.04
"""Of the time without drafts, what they may lose in the long run: a pause is as long as that takes. More on a
device, whose trials are dear: texts would be over before there was another one."""
_DOUBLINGS = 2
"""How often a pause is doubled where those before it led to nothing."""
_LONGEST_PAUSE = 1024
_LONG_TEXT = 64
"""Windows of a request after which the next one begins with drafts: its text may be another kind."""
_MOST_OWED = 256
"""Windows of a pause that may be put off by that."""


class DraftLength:
    """Chooses the number of drafts that gives most ids a second; none while they do not pay.

    Live rows are all that it changes, so answers do not depend on its clock. Whether drafts pay is not read
    off the estimates, which a few windows upset, but from the account of what they won and lost: it starts
    with a little, and drafts pause when it is spent. So drafts that pay a little go on, and what others
    cost is bounded.
    """

    def __init__(self, most: int, *, ahead: bool = False):
        """Knows nothing yet.

        Args:
            most: drafts of a window.
            ahead: windows without drafts are put into a device's queue a step ahead of the host.
        """
        self._ahead = ahead
        self._share = _SHARE_AHEAD if ahead else _SHARE
        self._grant_again = _GRANT_AGAIN_AHEAD if ahead else _GRANT_AGAIN
        self._reached = [_HOPED] * most  # windows in which all drafts before this place came true
        self._came_true = [_HOPED * _HOPE] * most
        self._seconds: dict[int, collections.deque[float]] = {}  # by drafts wanted
        self._account = _GRANT  # in windows without drafts
        self._lost = 0.0  # since drafts were tried again, or had won enough
        self._failed = 0  # pauses one after the other
        self._owed = 0  # windows of a pause that a request cut short: the next one is longer
        self._asked = 0  # windows whose drafter was asked
        self._looking = False  # the pause is one to look what windows without drafts cost
        self._unlooked = 0  # windows with drafts since one without was timed
        self._settling = _COLD
        self._undrafted = 0  # windows without drafts since the last one with drafts
        self._cold_drafts = _COLD_DRAFTS  # still to come
        self._windows = 0  # of the request
        self.paused = 0
        """Windows without drafts that are still to come."""

    def begin(self) -> None:
        """A request begins."""
        is_long = self._windows >= _LONG_TEXT
        if is_long and not self._looking and 0 < self.paused <= _MOST_OWED:
            self._owed, self.paused = self.paused, 0
        self._windows = 0

    def choose(self, room: int) -> tuple[int, float]:
        """The number of drafts for the next window, and its speed against one without.

        Args:
            room: drafts that the window may have.
        """
        if self.paused > 0 or room <= 0 or len(self._seconds.get(0, ())) < _KNOWN:
            return 0, 0.0
        count, speed = self._best(room)
        if self._asked % _EXPLORE == _EXPLORE - 1:
            count = min(count + 1, room, len(self._reached))
        return count, speed

    def seen(self, came_true: int, seconds: float, *, wanted: int) -> bool:
        """Takes note of a window.

        Args:
            came_true: of its drafts.
            seconds: with the drafter's time.
            wanted: drafts that its drafter was asked for, of which it may have made fewer, or none.

        Returns:
            whether a pause begins.
        """
        self._windows += 1
        if wanted == 0:
            self._seen_without(seconds)
            return False
        self._undrafted, self._settling = 0, _SETTLING_AHEAD if self._ahead else _SETTLING
        self._unlooked += 1
        if 0 not in self._seconds:
            return False
        won = came_true + 1 - min(seconds / self._cost(0), _OUTLIER)
        if self._cold_drafts > 0:
            self._cold_drafts -= 1
            self._lost -= won if self._asked else 0.0
            return False
        self._asked += 1
        self._learn(came_true, seconds, wanted)
        if self.paused > 0:  # a device had this window in its queue
            self._prolong(-won)
            return False
        return self._pay(won)

    def _seen_without(self, seconds: float) -> None:
        self._undrafted += 1
        if self._undrafted > self._settling:
            self._unlooked = 0
            times = self._seconds.setdefault(0, collections.deque(maxlen=_KNOWN))
            times.append(seconds)
        elif self.paused > 0 and not self._looking:
            # A device that gets going again is part of what drafts cost.
            self._prolong(min(seconds / self._cost(0), _OUTLIER) - 1)
        self.paused = max(0, self.paused - 1)
        self._looking &= self.paused > 0

    def _prolong(self, lost: float) -> None:
        """Makes a pause as much longer as it takes to pay for what was lost since it began."""
        if not self._looking:
            self.paused = min(self.paused + int(max(0.0, lost) / self._share), _LONGEST_PAUSE)

    def _learn(self, came_true: int, seconds: float, wanted: int) -> None:
        times = self._seconds.setdefault(wanted, collections.deque(maxlen=_REMEMBERED))
        times.append(seconds)
        for place in range(min(came_true + 1, wanted)):
            self._reached[place] = _FORGET * self._reached[place] + 1
            self._came_true[place] = _FORGET * self._came_true[place] + (place < came_true)

    def _pay(self, won: float) -> bool:
        """Puts what a window won on the account; whether a pause begins."""
        self._lost -= won
        self._account += won
        if self._account > _SAVED:
            self._account, self._lost, self._failed, self._owed = _SAVED, 0.0, 0, 0
        if self._account < 0:
            self._begin_pause()
            return True
        _, speed = self._best(len(self._reached))
        stale, look = (_STALE_AHEAD, _LOOK_AHEAD) if self._ahead else (_STALE, _LOOK)
        if self._unlooked >= (stale if speed < _SURE else _RARELY * stale):
            self._looking, self.paused = True, look
        return False

    def _begin_pause(self) -> None:
        times = 2 ** min(self._failed, _DOUBLINGS)
        lost = max(self._lost, self._grant_again)
        self.paused = min(self._owed + int(times * lost / self._share), _LONGEST_PAUSE)
        self._failed, self._owed = self._failed + 1, 0
        self._account, self._lost = self._grant_again, 0.0
        self._cold_drafts = int(self._ahead)  # that window waits for the device to run empty
        # The text may be another one by then: what was seen counts as much as a few drafts.
        chances = [t / n for t, n in zip(self._came_true, self._reached)]
        self._came_true = [_HOPED * chance for chance in chances]
        self._reached = [_HOPED] * len(chances)

    def _best(self, room: int) -> tuple[int, float]:
        """At least one draft: whether any pay is another question."""
        counts = range(1, min(room, len(self._reached)) + 1)
        speed, count = max((self._speed(count), -count) for count in counts)
        return -count, speed

    def _speed(self, drafts: int) -> float:
        """Ids of a window with so many drafts, over its time in windows without."""
        ids = chance = 1.0
        for place in range(drafts):
            chance *= self._came_true[place] / self._reached[place]
            ids += chance
        return ids * self._cost(0) / self._cost(drafts)

    def _cost(self, drafts: int) -> float:
        """Seconds of a window of which so many are wanted; fewer may be made, so their mean counts."""
        if drafts in self._seconds:
            times = self._seconds[drafts]
            most = 2 * statistics.median(times)
            return statistics.fmean(min(seconds, most) for seconds in times)
        base = self._cost(0)
        known = [count for count in self._seconds if count > 0]
        if not known:
            return base * (1 + _COST_OF_ROW * drafts)
        nearest = min(known, key=lambda count: abs(count - drafts))
        more = max(0.0, self._cost(nearest) - base)
        # A drafter that was asked has cost something, however little it was asked for.
        return base + more * (1 + drafts / nearest) / 2
