# Kernels at build time.
#
#   attnloom_add_kernels(TARGET app MANIFEST kernels.lua ARCHS 80 90a [EMBED])
#
# Compiles the kernels of a manifest while `app` is built; NVRTC is needed, a GPU is not. Without EMBED they are in
# kernels.pack in the current binary folder, for loom_context_add_pack and for install(FILES). With EMBED they are in the
# program, as kernels_pack and kernels_pack_bytes. Both are named after the manifest.
function(attnloom_add_kernels)
    cmake_parse_arguments(PARSE_ARGV 0 KERNELS "EMBED" "TARGET;MANIFEST" "ARCHS")
    foreach(word TARGET MANIFEST ARCHS)
        if(NOT KERNELS_${word})
            message(FATAL_ERROR "attnloom_add_kernels: ${word} is missing")
        endif()
    endforeach()
    if(KERNELS_UNPARSED_ARGUMENTS)
        message(FATAL_ERROR "attnloom_add_kernels: '${KERNELS_UNPARSED_ARGUMENTS}' is not known")
    endif()
    if(NOT TARGET ${KERNELS_TARGET})
        message(FATAL_ERROR "attnloom_add_kernels: TARGET '${KERNELS_TARGET}' does not exist")
    endif()
    get_filename_component(manifest ${KERNELS_MANIFEST} ABSOLUTE)
    if(NOT EXISTS ${manifest})
        message(FATAL_ERROR "attnloom_add_kernels: MANIFEST '${manifest}' does not exist")
    endif()
    get_property(languages GLOBAL PROPERTY ENABLED_LANGUAGES)
    if(KERNELS_EMBED AND NOT C IN_LIST languages)
        message(FATAL_ERROR "attnloom_add_kernels: EMBED makes a C file: add C to the languages of the project")
    endif()

    get_filename_component(name ${manifest} NAME_WE)
    list(JOIN KERNELS_ARCHS "," archs)
    set(made ${CMAKE_CURRENT_BINARY_DIR}/${name}.pack)
    set(embed)
    if(KERNELS_EMBED)
        set(made ${CMAKE_CURRENT_BINARY_DIR}/${name}.c)
        set(embed --embed)
    endif()
    add_custom_command(OUTPUT ${made}
        COMMAND attnloom::command pack ${manifest} --arch ${archs} ${embed} -o ${made}
        DEPENDS ${manifest} $<TARGET_FILE:attnloom::command> $<TARGET_FILE:attnloom::attnloom>
        COMMENT "Kernels of ${name}.lua for ${archs}" VERBATIM)
    if(KERNELS_EMBED)
        target_sources(${KERNELS_TARGET} PRIVATE ${made})
    else()
        add_custom_target(${KERNELS_TARGET}_${name}_pack DEPENDS ${made})
        add_dependencies(${KERNELS_TARGET} ${KERNELS_TARGET}_${name}_pack)
    endif()
endfunction()
