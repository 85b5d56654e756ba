# find_package(attnloom): the library attnloom::attnloom and, unless it was built with ATTNLOOM_RUNTIME_ONLY, the program
# attnloom::command and attnloom_add_kernels.
include(${CMAKE_CURRENT_LIST_DIR}/attnloomTargets.cmake)
if(TARGET attnloom::command)
    include(${CMAKE_CURRENT_LIST_DIR}/AttnloomKernels.cmake)
endif()
