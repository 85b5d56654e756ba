# find_package(attnloom): the library attnloom::attnloom, the program attnloom::command, and attnloom_add_kernels.
include(${CMAKE_CURRENT_LIST_DIR}/attnloomTargets.cmake)
include(${CMAKE_CURRENT_LIST_DIR}/AttnloomKernels.cmake)
