#pragma once

#include <cstring>
#include <vector>

#include "comm/shared_memory/group.h"

namespace polyreme {

// One meeting, at which every rank learns the note of every rank. Plain bytes, kNoteBytes at most.
template <typename Note>
std::vector<Note> exchange_notes(SharedGroup& group, const Note& note) {
  static_assert(sizeof(Note) <= kNoteBytes);
  const int slot = group.slot();
  std::memcpy(group.note(group.rank(), slot), &note, sizeof(note));
  group.meet();
  std::vector<Note> notes(static_cast<size_t>(group.size()));
  for (int r = 0; r < group.size(); ++r)
    std::memcpy(&notes[static_cast<size_t>(r)], group.note(r, slot), sizeof(note));
  return notes;
}

}  // namespace polyreme
