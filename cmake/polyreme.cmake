# The rules that every target is built by.

find_package(Threads REQUIRED)

add_library(polyreme_flags INTERFACE)
# No contraction of a*b+c: bits must not depend on the instruction set (README, "The promise").
target_compile_options(polyreme_flags INTERFACE -ffp-contract=off -fno-math-errno -fno-trapping-math
                       -Wall -Wextra -Wshadow -Wno-missing-field-initializers)
if(POLYREME_WERROR)
  target_compile_options(polyreme_flags INTERFACE -Werror)
endif()
target_include_directories(polyreme_flags INTERFACE ${PROJECT_SOURCE_DIR}/csrc)
target_link_libraries(polyreme_flags INTERFACE Threads::Threads)
if(POLYREME_SANITIZE)
  # -O3 and full debug information take the compiler 20 times as long on the kernels.
  target_compile_options(polyreme_flags INTERFACE -fsanitize=${POLYREME_SANITIZE} -fno-sanitize-recover=all
                         -fno-omit-frame-pointer -O1 -g1 $<$<CXX_COMPILER_ID:GNU>:-fno-var-tracking>)
  target_link_options(polyreme_flags INTERFACE -fsanitize=${POLYREME_SANITIZE})
endif()
if(POLYREME_FUZZ)
  if(NOT CMAKE_CXX_COMPILER_ID STREQUAL "Clang")
    message(FATAL_ERROR "POLYREME_FUZZ=ON needs clang with libFuzzer, the compiler is ${CMAKE_CXX_COMPILER_ID}: "
                        "use cmake --preset fuzz, after apt-get install clang libclang-rt-dev.")
  endif()
  # Counts what runs. Clang does not know some of the pragmas of g++.
  target_compile_options(polyreme_flags INTERFACE -fsanitize=fuzzer-no-link -Wno-unknown-pragmas)
endif()

# Instruction-set levels: <name> <flags>. Kernel files are compiled once per level.
set(POLYREME_ISAS avx2 avx512)
set(POLYREME_ISA_FLAGS_avx2 -mavx2 -mfma -mf16c)
set(POLYREME_ISA_FLAGS_avx512 -mavx512f -mavx512bw -mavx512dq -mavx512vl -mfma -mf16c -mprefer-vector-width=512)

# polyreme_module(name SOURCES ... DEPENDS ...): the static library polyreme_<name> of csrc/<name>.
# DEPENDS is the rule of layering: a module can include only what it links.
function(polyreme_module name)
  cmake_parse_arguments(ARG "" "" "SOURCES;DEPENDS" ${ARGN})
  add_library(polyreme_${name} STATIC ${ARG_SOURCES})
  target_link_libraries(polyreme_${name} PUBLIC polyreme_flags)
  foreach(dependency ${ARG_DEPENDS})
    target_link_libraries(polyreme_${name} PUBLIC polyreme_${dependency})
  endforeach()
endfunction()

# polyreme_isa_sources(target files...): adds the files to the target, compiled once per level.
function(polyreme_isa_sources target)
  foreach(isa ${POLYREME_ISAS})
    add_library(${target}_${isa} OBJECT ${ARGN})
    target_compile_options(${target}_${isa} PRIVATE ${POLYREME_ISA_FLAGS_${isa}})
    target_compile_definitions(${target}_${isa} PRIVATE POLYREME_ISA=${isa})
    target_link_libraries(${target}_${isa} PRIVATE polyreme_flags)
    target_sources(${target} PRIVATE $<TARGET_OBJECTS:${target}_${isa}>)
  endforeach()
endfunction()

# polyreme_python_module(name SOURCES ... DEPENDS ...): the extension module <name>, installed into the
# package. DEPENDS are modules, as in polyreme_module.
function(polyreme_python_module name)
  cmake_parse_arguments(ARG "" "" "SOURCES;DEPENDS" ${ARGN})
  find_package(Python REQUIRED COMPONENTS Interpreter Development.Module)
  find_package(pybind11 CONFIG REQUIRED)
  # NO_EXTRAS: no link-time optimisation, which would build the module by other rules than the tests.
  pybind11_add_module(${name} MODULE NO_EXTRAS ${ARG_SOURCES})
  target_link_libraries(${name} PRIVATE polyreme_flags)
  foreach(dependency ${ARG_DEPENDS})
    target_link_libraries(${name} PRIVATE polyreme_${dependency})
  endforeach()
  install(TARGETS ${name} LIBRARY DESTINATION polyreme)
endfunction()
