# How this build came about, as C++: csrc/base/build_info.h.

# The commit, or "" outside a git checkout (an unpacked sdist, a tarball).
function(polyreme_git_describe result)
  set(${result} "" PARENT_SCOPE)
  find_package(Git QUIET)
  # A checkout of something else around us is not our history.
  if(NOT Git_FOUND OR NOT EXISTS ${PROJECT_SOURCE_DIR}/.git)
    return()
  endif()
  execute_process(COMMAND ${GIT_EXECUTABLE} describe --always --tags --abbrev=12
                  WORKING_DIRECTORY ${PROJECT_SOURCE_DIR}
                  OUTPUT_VARIABLE output ERROR_QUIET OUTPUT_STRIP_TRAILING_WHITESPACE)
  set(${result} "${output}" PARENT_SCOPE)
  # A new commit configures again, so the answer is not a stale one.
  execute_process(COMMAND ${GIT_EXECUTABLE} rev-parse --git-path logs/HEAD
                  WORKING_DIRECTORY ${PROJECT_SOURCE_DIR}
                  OUTPUT_VARIABLE log ERROR_QUIET OUTPUT_STRIP_TRAILING_WHITESPACE)
  cmake_path(ABSOLUTE_PATH log BASE_DIRECTORY ${PROJECT_SOURCE_DIR})
  if(EXISTS ${log})
    set_property(DIRECTORY ${PROJECT_SOURCE_DIR} APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${log})
  endif()
endfunction()

# polyreme_add_build_info(target): adds the generated source to the target.
function(polyreme_add_build_info target)
  polyreme_git_describe(git_describe)
  get_target_property(options polyreme_flags INTERFACE_COMPILE_OPTIONS)
  string(TOUPPER ${CMAKE_BUILD_TYPE} type)
  string(JOIN " " cxx_flags ${CMAKE_CXX_FLAGS} ${CMAKE_CXX_FLAGS_${type}} ${options})
  set(cuda_architectures "")
  if(POLYREME_CUDA_FOUND)
    string(REPLACE ";" " " cuda_architectures "${CMAKE_CUDA_ARCHITECTURES}")
  endif()
  string(REPLACE ";" " " isas "${POLYREME_ISAS}")
  configure_file(${PROJECT_SOURCE_DIR}/csrc/base/build_info.cpp.in ${PROJECT_BINARY_DIR}/build_info.cpp @ONLY)
  target_sources(${target} PRIVATE ${PROJECT_BINARY_DIR}/build_info.cpp)
endfunction()
