/* curve_keys.c - the CURVE key that encrypts what the ranks and the controller of a run send each other.
 *
 * Invariant: a key is new each time. */
#include "comm/comm_int.h"

#include "base/err.h"

int comm_key_new(char key[COMM_KEY]) {
    char public_key[COMM_KEY];
    TRY(comm__zmq_open());
    if (zmq.curve_keypair(public_key, key) != 0) return comm__zmq_fail("a CURVE key cannot be made");
    return 0;
}
