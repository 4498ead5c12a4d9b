#include "fuzz.h"

#include <filesystem>
#include <fstream>

// Called before the inputs are read: adds the seeds to the first folder of the command line.
extern "C" int LLVMFuzzerInitialize(int* argc, char*** argv) {
  for (int i = 1; i < *argc; ++i) {
    const std::filesystem::path folder = (*argv)[i];
    if (!std::filesystem::is_directory(folder)) continue;
    size_t number = 0;
    for (const std::string& seed : polyreme::fuzz::seeds())
      std::ofstream(folder / ("seed-" + std::to_string(number++)), std::ios::binary) << seed;
    break;
  }
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  FuzzedDataProvider input(data, size);
  polyreme::fuzz::try_input(input);
  return 0;
}
