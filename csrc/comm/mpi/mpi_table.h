// What libpolyreme_mpi.so and its loader agree on: one exported C function that returns a table of
// function pointers. Plain C types only, since the two objects may come from different builds.
#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// Raised whenever the table or a struct below changes. The loader refuses any other number.
#define POLYREME_MPI_TABLE_VERSION 1
#define POLYREME_MPI_TABLE_SYMBOL "polyreme_mpi_table"

// Codes of our own, which are none of MPI's.
#define POLYREME_MPI_SUCCESS 0
#define POLYREME_MPI_WRONG_SIZE (-1)
#define POLYREME_MPI_UNUSABLE (-2)

// Outcome of a call: MPI's error number, or one of the above, with a text for people.
struct PolyremeMpiStatus {
  int32_t code;
  char text[508];
};

// This process in MPI's world.
struct PolyremeMpiWorld {
  int32_t rank;
  int32_t size;
  int32_t max_tag;
  char library[128];  // "Open MPI v4.1.4, ..."
};

// Ranks are of MPI's world.
struct PolyremeMpiMessage {
  int32_t sends;
  int32_t peer;  // -1: received from any rank
  int32_t tag;
  int32_t may_be_shorter;  // a receive that takes messages of up to num_bytes bytes
  void* data;
  int64_t num_bytes;
};

struct PolyremeMpiProgress {
  int32_t num_ended;  // in this call
  int32_t num_left;
  int32_t peer;       // of the last receive that ended, or the one with the wrong size
  int64_t num_bytes;  // likewise, as received
};

// Messages under way.
struct PolyremeMpiBatch;

// The functions may be called from any thread; they take turns, and none of them waits for another rank but
// `start`.
struct PolyremeMpiTable {
  uint32_t version;
  uint32_t size_bytes;
  // Starts MPI unless it is running, and then ends it at the end of the process. Collective over the world at
  // the first call of a process.
  struct PolyremeMpiStatus (*start)(struct PolyremeMpiWorld* world);
  // MPI is not ended in an orderly way any more: a rank may have died.
  void (*give_up)(void);
  // Tags below the result are in use. Raises it to `at_least`.
  int32_t (*reserve_tags)(int32_t at_least);

  struct PolyremeMpiStatus (*post)(const struct PolyremeMpiMessage* messages, int32_t num_messages,
                                   struct PolyremeMpiBatch** batch);
  struct PolyremeMpiStatus (*test)(struct PolyremeMpiBatch* batch, struct PolyremeMpiProgress* progress);
  // Sets is_pending[r] to 1 for each peer of a message that has not ended.
  void (*pending)(const struct PolyremeMpiBatch* batch, uint8_t* is_pending);
  // Frees the batch. Receives that have not ended are cancelled; returns 0 if something is under way even so,
  // and the memory of the messages must live on.
  int32_t (*end)(struct PolyremeMpiBatch* batch);
};

#ifdef __cplusplus
}
#endif
