# find_package(attnloom): the library attnloom::attnloom and, unless it was built with ATTNLOOM_RUNTIME_ONLY, the program
# attnloom::command and attnloom_add_kernels.
include(${CMAKE_CURRENT_LIST_DIR}/attnloomTargets.cmake)
if(TARGET attnloom::command)
    include(${CMAKE_CURRENT_LIST_DIR}/AttnloomKernels.cmake)
else()
    function(attnloom_add_kernels)
        message(FATAL_ERROR "attnloom_add_kernels: ${CMAKE_CURRENT_FUNCTION_LIST_DIR} was built with ATTNLOOM_RUNTIME_ONLY and "
            "has no program that makes kernels: find a package with it, or add a pack made by `attnloom pack`")
    endfunction()
endif()
