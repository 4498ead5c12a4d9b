# Looks for CUDA, NCCL and MPI. What is missing is said in the summary and by `polyreme doctor`.
#
# Sets POLYREME_<backend>_FOUND to a version, or to "" with the reason in POLYREME_<backend>_ABSENT.
# Nothing here links a backend into the core: each one is a shared object of its own.

include(CheckLanguage)

# polyreme_conclude(backend version remedy): sets the two variables above. Fails if ON is not met.
function(polyreme_conclude backend version remedy)
  set(wanted ${POLYREME_${backend}})
  if(NOT wanted MATCHES "^(AUTO|ON|OFF)$")
    message(FATAL_ERROR "POLYREME_${backend} is '${wanted}'; expected AUTO, ON or OFF.")
  endif()
  set(absent "")
  if(wanted STREQUAL "OFF")
    set(absent "not looked for (POLYREME_${backend}=OFF)")
  elseif(NOT version)
    set(absent "not found (${remedy})")
    if(wanted STREQUAL "ON")
      message(FATAL_ERROR "POLYREME_${backend}=ON, but ${backend} was not found: ${remedy}, "
                          "or build with POLYREME_${backend}=OFF.")
    endif()
  endif()
  set(POLYREME_${backend}_FOUND "${version}" PARENT_SCOPE)
  set(POLYREME_${backend}_ABSENT "${absent}" PARENT_SCOPE)
endfunction()

# ---- CUDA ----------------------------------------------------------------------------------------
# CMake 3.25 does not know C++20 for nvcc, and "native" needs a GPU: set before the language.
set(CMAKE_CUDA_ARCHITECTURES "80-real;90-real;100-real;100-virtual" CACHE STRING "GPU architectures")
set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20")
set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION "-std=c++20")
set(CMAKE_CUDA_STANDARD 20)
set(CMAKE_CUDA_VISIBILITY_PRESET hidden)
set(CMAKE_CUDA_RUNTIME_LIBRARY Static)

# Compiled by nvcc for GPUs, and as C++ for the emulator of the tests.
set(POLYREME_KERNEL_SOURCES "")
foreach(kernel attention cross_entropy elementwise embedding fingerprint gemm gradient_norm ids norm optimizer random rotary rows tree_reduce whole_param)
  list(APPEND POLYREME_KERNEL_SOURCES ${PROJECT_SOURCE_DIR}/kernels/${kernel}.cu)
endforeach()

set(version "")
if(NOT POLYREME_CUDA STREQUAL "OFF")
  if(NOT CMAKE_CUDA_COMPILER AND NOT DEFINED ENV{CUDACXX})
    # The toolkit's own folder is rarely on PATH.
    find_program(POLYREME_NVCC nvcc HINTS ENV CUDA_HOME ENV CUDA_PATH /usr/local/cuda PATH_SUFFIXES bin)
    if(POLYREME_NVCC)
      # Not CMAKE_CUDA_COMPILER: then check_language would not try whether it works.
      set(ENV{CUDACXX} ${POLYREME_NVCC})
    endif()
  endif()
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    enable_language(CUDA)
    find_package(CUDAToolkit REQUIRED)
    set(version ${CMAKE_CUDA_COMPILER_VERSION})
  endif()
endif()
polyreme_conclude(CUDA "${version}" "install the CUDA toolkit, or set CUDACXX to its nvcc")

# ---- NCCL ----------------------------------------------------------------------------------------
set(version "")
if(NOT POLYREME_NCCL STREQUAL "OFF")
  find_path(NCCL_INCLUDE_DIR nccl.h HINTS ENV NCCL_ROOT PATHS /usr/local/cuda PATH_SUFFIXES include)
  # NCCL's wheel has only the name with the version.
  find_library(NCCL_LIBRARY NAMES nccl libnccl.so.2 HINTS ENV NCCL_ROOT PATHS /usr/local/cuda PATH_SUFFIXES lib)
  if(NCCL_INCLUDE_DIR AND NCCL_LIBRARY)
    foreach(part MAJOR MINOR PATCH)
      file(STRINGS ${NCCL_INCLUDE_DIR}/nccl.h line REGEX "#define NCCL_${part} " LIMIT_COUNT 1)
      string(REGEX REPLACE "[^0-9]+" "" ${part} "${line}")
    endforeach()
    set(version "${MAJOR}.${MINOR}.${PATCH}")
  endif()
endif()
polyreme_conclude(NCCL "${version}" "install libnccl-dev, or set NCCL_ROOT")

# ---- MPI -----------------------------------------------------------------------------------------
set(version "")
# CMake's own search is slow and talkative where there is nothing to find.
find_program(POLYREME_MPICXX mpicxx)
if(POLYREME_MPICXX AND NOT POLYREME_MPI STREQUAL "OFF")
  set(MPI_CXX_SKIP_MPICXX TRUE)  # the C++ interface that MPI-3 removed
  find_package(MPI QUIET COMPONENTS CXX)
  if(MPI_CXX_FOUND)
    # The launcher's first line tells the implementation: "mpirun (Open MPI) 4.1.4".
    execute_process(COMMAND ${MPIEXEC_EXECUTABLE} --version OUTPUT_VARIABLE output ERROR_QUIET)
    string(REGEX MATCH "^[^\n]*" implementation "${output}")
    set(version "${MPI_CXX_VERSION}, ${implementation}")
  endif()
endif()
polyreme_conclude(MPI "${version}" "install libopenmpi-dev")

function(polyreme_print_summary)
  message(STATUS "polyreme ${PROJECT_VERSION}, ${CMAKE_BUILD_TYPE}")
  message(STATUS "  CPU levels  ${POLYREME_ISAS}")
  foreach(backend CUDA NCCL MPI)
    string(SUBSTRING "${backend}            " 0 11 label)
    message(STATUS "  ${label} ${POLYREME_${backend}_FOUND}${POLYREME_${backend}_ABSENT}")
  endforeach()
  message(STATUS "  Python      ${POLYREME_PYTHON}")
  message(STATUS "  C++ tests   ${POLYREME_TESTS}")
  message(STATUS "  Sanitizers  ${POLYREME_SANITIZE}")
endfunction()
