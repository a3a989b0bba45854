/* The completion flags of ubep without barrier or acknowledgement; docs/why-no-barrier.md has the argument.
 *
 * Operations are numbered n = 1, 2, 3, ... here. The protocol sees only EPOCH(n), which wraps. A row holds n itself
 * (a ghost), so that a row one whole wrap too old is noticed as well.
 *
 *   -DR=3      ranks (2)                       -DEMPTY    rows or none: free for each peer and operation
 *   -DOPS=9    operations, at most 9 (8)       -DCHECKED  counts first, rows after all counts; implies EMPTY
 *   -DMAX=5    last epoch, odd (5)             -DSELF     a rank sends to itself through the fabric, too
 *   -DROWS_FLAG_ON_DEMAND -DCLEAR_AT_WRAP with CHECKED: what ubep does; the first without the second is a mutation
 *   -DENDLESS  operations never end; OPS - 1 is a multiple of MAX - 1, the period of the epochs
 *
 * Mutations: ONE_PARITY FLAG_BEFORE_DATA NO_EPOCH GREATER_EQUAL NO_FLAG_WHEN_EMPTY ROWS_FLAG_ON_DEMAND LATE_READ
 * WRAP_TO_ZERO WRAP_TO_ONE START_AT_ZERO, and MAX=3.
 */
#ifndef R
#define R 2
#endif
#ifndef OPS
#define OPS 8
#endif
#ifndef MAX
#define MAX 5
#endif

#if OPS > 9 || (defined(ENDLESS) && (OPS - 1) % (MAX - 1))
#error OPS
#endif

#if defined(CHECKED) || defined(NO_FLAG_WHEN_EMPTY)
#undef EMPTY
#define EMPTY
#endif

#if defined(WRAP_TO_ZERO)
#define EPOCH(n) ((n) % (MAX + 1))
#elif defined(WRAP_TO_ONE)
#define EPOCH(n) (1 + ((n) - 1) % MAX)
#elif defined(START_AT_ZERO)
#define EPOCH(n) ((n) - 1)
#else
#define EPOCH(n) ((n) < 2 -> (n) : 2 + ((n) - 2) % (MAX - 1)) /* 1 2 3 4 5 2 3 4 5 2 ... */
#endif

#ifdef ONE_PARITY
#define PARITY(n) 0
#else
#define PARITY(n) (EPOCH(n) % 2)
#endif

#if defined(NO_EPOCH)
#define IS(w, n) ((w) != 0)
#elif defined(GREATER_EQUAL)
#define IS(w, n) ((w) / 2 >= EPOCH(n))
#else
#define IS(w, n) ((w) / 2 == EPOCH(n))
#endif

#ifdef ENDLESS /* n runs 1 2 ... OPS 2 ... OPS 2 ... */
#define NEXT(n) ((n) == OPS -> 2 : (n) + 1)
#define UP_TO(n) (~BIT(NEXT(n)))
#else
#define NEXT(n) ((n) + 1)
#define UP_TO(n) (2 * BIT(n) - 1)
#endif

#define BIT(n) (1 << (n))
#define PAIR(s, d) ((s) * R + (d))
#define SLOT(s, d, n) (2 * PAIR(s, d) + PARITY(n))

/* The windows. Only s writes the slot and the words of (s, d); d reads them. A word is epoch * 2 + payload. */
byte lo[2 * R * R], hi[2 * R * R]; /* the halves of a row: which operation wrote them */
byte word[2 * R * R];              /* the flag behind the rows */
#ifdef CHECKED
byte head[2 * R * R]; /* the flag that carries the count */
#endif

/* In flight from s to d: bit n for operation n. */
short put_lo[R * R], put_hi[R * R], flag[R * R];
#ifdef CHECKED
short count[R * R];
#endif
short rows[R * R]; /* ghost: s has rows for d in operation n, and d did not take them yet */
byte at[R];        /* the operation that a rank is in */

/* Everything in flight lands at any time and in any order, but a flag after the puts before it (release). */
#ifdef FLAG_BEFORE_DATA
#define RELEASED(n) true
#else
#define RELEASED(n) (((put_lo[k] | put_hi[k]) & UP_TO(n)) == 0)
#endif

#define PAYLOAD(n) ((rows[k] >> (n)) & 1)
#define TAKE(mask, n) mask = mask & ~BIT(n)

#ifdef ENDLESS /* the owner has finished operation n - 2 when a put of n lands */
#define OWNER_DONE(n) assert(at[d] == n || NEXT(at[d]) == n)
#else
#define OWNER_DONE(n) skip
#endif

#ifdef CHECKED
#define LAND_COUNT(n) \
    :: d_step { count[k] & BIT(n) -> TAKE(count[k], n); head[SLOT(s, d, n)] = 2 * EPOCH(n) + PAYLOAD(n) }
#else
#define LAND_COUNT(n)
#endif

#define LAND(n) \
    LAND_COUNT(n) \
    :: d_step { put_lo[k] & BIT(n) -> TAKE(put_lo[k], n); lo[SLOT(s, d, n)] = n; OWNER_DONE(n) } \
    :: d_step { put_hi[k] & BIT(n) -> TAKE(put_hi[k], n); hi[SLOT(s, d, n)] = n; OWNER_DONE(n) } \
    :: d_step { (flag[k] & BIT(n)) && RELEASED(n) -> \
                TAKE(flag[k], n); word[SLOT(s, d, n)] = 2 * EPOCH(n) + PAYLOAD(n) }

proctype Wire(byte s, d) {
    byte k = PAIR(s, d);
end:
    do
    LAND(1) LAND(2) LAND(3) LAND(4) LAND(5) LAND(6) LAND(7) LAND(8) LAND(9)
    od
}

#ifdef SELF
#define PEER(s) ((s) < R)
#else
#define PEER(s) ((s) < R && (s) != me)
#endif
#define PEERS (BIT(R) - 1 - (PEER(me) -> 0 : BIT(me)))
#define IN(s) SLOT(s, me, n)

#ifdef LATE_READ /* in operation n the rows of n - 1 are read */
#define READ_OF (n - 1)
#else
#define READ_OF n
#endif

#ifdef CHECKED
#define HAS_ROWS(s) (head[IN(s)] % 2)
#define COUNTED(s) (!PEER(s) || IS(head[IN(s)], n))
#elif defined(EMPTY)
#define HAS_ROWS(s) (word[IN(s)] % 2)
#else
#define HAS_ROWS(s) 1
#endif

#ifdef ROWS_FLAG_ON_DEMAND /* no rows, no flag behind them: the count tells the receiver not to wait */
#define ARRIVED(s) (!HAS_ROWS(s) || IS(word[IN(s)], n))
#else
#define ARRIVED(s) IS(word[IN(s)], n)
#endif

#if defined(NO_FLAG_WHEN_EMPTY) || defined(ROWS_FLAG_ON_DEMAND)
#define FLAGGED(k) ((rows[k] >> n) & 1)
#else
#define FLAGGED(k) 1
#endif

#ifdef EMPTY
#define COUNT_IS_RIGHT(s) assert(HAS_ROWS(s) == ((rows[PAIR(s, me)] >> n) & 1))
#else
#define COUNT_IS_RIGHT(s) skip
#endif

#define ROW_IS_RIGHT(half, s) \
    assert(!HAS_ROWS(s) || READ_OF == 0 || half[SLOT(s, me, READ_OF)] == READ_OF)

/* Any moment from the arrival to the end of the operation may be the one of the read. Both halves in one step are
 * therefore enough: a half that is wrong at some such moment is found by the read at that moment. */
#define READ(s) \
    :: d_step { PEER(s) && (unread & BIT(s)) && ARRIVED(s) -> \
                TAKE(unread, s); COUNT_IS_RIGHT(s); ROW_IS_RIGHT(lo, s); ROW_IS_RIGHT(hi, s) }

/* To issue everything in one step loses nothing: what is in flight may land as late as if it had been issued late. */
inline choose_rows() {
    for (d : 0 .. R - 1) {
        if
        :: PEER(d) -> rows[PAIR(me, d)] = rows[PAIR(me, d)] | BIT(n)
#ifdef EMPTY
        :: PEER(d)
#endif
        :: !PEER(d)
        fi
#ifdef CHECKED
        if
        :: PEER(d) -> count[PAIR(me, d)] = count[PAIR(me, d)] | BIT(n)
        :: else
        fi
#endif
    }
}

/* Before a rank announces the last epoch, and the first after the wrap, it forgets the words of the other parity. */
inline clear_words() {
#ifdef CLEAR_AT_WRAP
    if
    :: EPOCH(n) == MAX || EPOCH(n) == 2 ->
        for (d : 0 .. R - 1) {
            word[2 * PAIR(d, me) + 1 - PARITY(n)] = 0;
            head[2 * PAIR(d, me) + 1 - PARITY(n)] = 0
        }
    :: else
    fi
#else
    skip
#endif
}

inline send_rows() {
    for (d : 0 .. R - 1) {
        if
        :: PEER(d) ->
            put_lo[PAIR(me, d)] = put_lo[PAIR(me, d)] | (rows[PAIR(me, d)] & BIT(n));
            put_hi[PAIR(me, d)] = put_hi[PAIR(me, d)] | (rows[PAIR(me, d)] & BIT(n));
            flag[PAIR(me, d)] = flag[PAIR(me, d)] | (FLAGGED(PAIR(me, d)) << n)
        :: else
        fi
    }
}

proctype Rank(byte me) {
    byte n = 1, unread, d;
    do
    :: n <= OPS ->
        atomic {
            at[me] = n;
            clear_words();
            choose_rows();
#ifdef CHECKED
        }
        COUNTED(0) && COUNTED(1) && COUNTED(2);
        atomic {
#endif
            send_rows();
            unread = PEERS
        }
        do
        READ(0) READ(1) READ(2)
        :: unread == 0 -> break
        od;
progress:
        atomic {
            for (d : 0 .. R - 1) {
                TAKE(rows[PAIR(d, me)], n)
            }
            n = NEXT(n)
        }
    :: else -> break
    od
}

init {
    byte s, d;
    atomic {
        for (s : 0 .. R - 1) {
            run Rank(s);
            for (d : 0 .. R - 1) {
#ifdef SELF
                run Wire(s, d)
#else
                if
                :: s != d -> run Wire(s, d)
                :: else
                fi
#endif
            }
        }
    }
}
