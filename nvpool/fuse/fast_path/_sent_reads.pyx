# cython: language_level=3, boundscheck=False, wraparound=False
"""Messages of compiled reads, which Hedging watches like all others.

In a pool with one replica per chunk they are not watched. Used by _remote_reads and _small_files.
"""

from nvpool.client.data.hedged_reads import MEASURED_S

cdef double measured_s = MEASURED_S


cdef class SentReads(ReplyTaker):

    cdef int sent_to(self, lane, Py_ssize_t count, double now_s) except -1:
        """Record that a message with `count` reads is sent now."""
        self.lane, self.jobs, self.sent_s, self.count, self.cost = lane, None, now_s, count, count
        self.is_hedged = self.is_watched = False
        return 0

    cdef int watch(self, hedging) except -1:
        """Compiled `Hedging.watch`."""
        cdef dict sent = hedging.sent
        self.is_watched = True
        sent[self] = None
        if hedging.timer is None:
            hedging.start_timer()
        return 0

    cdef int came(self, hedging, double now_s) except -1:
        """Compiled `Hedging.came` for a good reply to a watched message; measures some of them only."""
        cdef dict sent = hedging.sent
        sent.pop(self, None)
        lane = self.lane
        if now_s - <double>lane.measured_s >= measured_s:
            lane.measured_s = now_s
            hedging.measure(lane, now_s - self.sent_s)
        return 0

    def end(self):
        """As of SentRead: replies are received into memory of their own."""
