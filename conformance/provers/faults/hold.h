// A call that waits until another thread of its process has run, and the two halves of that thread's work. Part of
// shim.c.
//
// Waiting is by futex on the session's own words: nobody spins, and a release that comes first is not lost.
#define FUTEX_WAIT_UNTIL 9  // FUTEX_WAIT_BITSET, whose limit is a point of time: a spurious wake does not prolong it
#define FUTEX_WAKE_ANY 1
#define FUTEX_ALL 0x7fffffff

static void wait_while(_Atomic uint32_t *word, uint32_t value, const struct timespec *until, int *error) {
    *error = (int)-tp_raw(SYS_futex, (long)word, FUTEX_WAIT_UNTIL, value, (long)until, 0, 0xffffffffL);
}

static void wake(_Atomic uint32_t *word) { tp_raw(SYS_futex, (long)word, FUTEX_WAKE_ANY, FUTEX_ALL, 0, 0, 0); }

// Waits for the release of this call. Returns whether the limit passed without one.
static int hold(struct tp_session *armed, uint32_t limit_us) {
    struct timespec until;
    int error = 0;
    tp_raw(SYS_clock_gettime, CLOCK_MONOTONIC, (long)&until, 0, 0, 0, 0);
    until.tv_nsec += (long)(limit_us % 1000000) * 1000;
    until.tv_sec += limit_us / 1000000 + until.tv_nsec / 1000000000;
    until.tv_nsec %= 1000000000;
    uint32_t ticket = atomic_fetch_add(&armed->held, 1) + 1;
    wake(&armed->held);
    for (;;) {
        uint32_t released = atomic_load(&armed->released);
        if ((int32_t)(released - ticket) >= 0) return 0;
        if (error == ETIMEDOUT) return 1;
        wait_while(&armed->released, released, &until, &error);
    }
}

// Blocks until a call is held, or the session is over. Returns how many calls were held until now, 0 when over.
EXPORT unsigned twinproof_faults_await_held(void) {
    struct tp_session *armed = session;
    int error;
    for (;;) {
        if (armed == NULL) return 0;
        uint32_t held = atomic_load(&armed->held);
        // A wave of no calls: the last one, see below.
        if (held == UINT32_MAX) return 0;
        if (held != atomic_load(&armed->released)) return held;
        wait_while(&armed->held, held, NULL, &error);
    }
}

// Lets the first `count` held calls go on.
EXPORT void twinproof_faults_release(unsigned count) {
    if (session == NULL) return;
    atomic_store(&session->released, count);
    wake(&session->released);
}

// Ends the waiting for held calls, for good.
EXPORT void twinproof_faults_end_holding(void) {
    if (session == NULL) return;
    atomic_store(&session->held, UINT32_MAX);
    wake(&session->held);
}
