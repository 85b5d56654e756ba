# Installs the package into a folder of its own, builds examples/packed outside of the source tree against it, by
# find_package and by pkg-config, and runs what comes out; then the same program with a library that takes kernels from
# packs alone. Without NVRTC a stand-in makes the kernels, which are then no
# code but take the same way.
#
#   cmake -DSOURCE= -DBUILD= -DGENERATOR= -DC_COMPILER= -DC_FLAGS= -DNM= -DNVRTC_STAND_IN= -P install.cmake
set(work ${BUILD}/tests/install)
file(REMOVE_RECURSE ${work})
file(MAKE_DIRECTORY ${work})

function(run)
    execute_process(COMMAND ${ARGN} WORKING_DIRECTORY ${work} RESULT_VARIABLE result OUTPUT_VARIABLE text ERROR_VARIABLE text)
    if(result)
        message(FATAL_ERROR "failed (${result}): ${ARGN}\n${text}")
    endif()
    set(text "${text}" PARENT_SCOPE)
endfunction()

# Of what must fail; lines are those of CMake's messages no more.
function(refuse)
    execute_process(COMMAND ${ARGN} WORKING_DIRECTORY ${work} RESULT_VARIABLE result OUTPUT_VARIABLE text ERROR_VARIABLE text)
    if(result EQUAL 0)
        message(FATAL_ERROR "did not fail: ${ARGN}\n${text}")
    endif()
    string(REGEX REPLACE "[ \n]+" " " text "${text}")
    set(text "${text}" PARENT_SCOPE)
endfunction()

function(expect words)
    string(FIND "${text}" "${words}" place)
    if(place EQUAL -1)
        message(FATAL_ERROR "'${words}' is not in:\n${text}")
    endif()
endfunction()

run(${CMAKE_COMMAND} --install ${BUILD} --prefix ${work}/first)
file(RENAME ${work}/first ${work}/moved) # an installed folder may be moved
run(${work}/moved/bin/attnloom info)
if(NOT text MATCHES "\nnvrtc +nvrtc ")
    message(STATUS "no NVRTC here: a stand-in makes the kernels")
    set(ENV{LOOM_NVRTC_DIR} ${NVRTC_STAND_IN})
endif()
set(ENV{LOOM_CACHE_DIR} ${work}/cache)

file(COPY ${SOURCE}/examples/packed DESTINATION ${work})
run(${CMAKE_COMMAND} -G ${GENERATOR} -S packed -B built -DCMAKE_PREFIX_PATH=${work}/moved -DCMAKE_C_COMPILER=${C_COMPILER}
    "-DCMAKE_C_FLAGS=-Wall -Wextra -Werror -pedantic ${C_FLAGS}")
run(${CMAKE_COMMAND} --build built)
set(without ${CMAKE_COMMAND} -E env --unset=LOOM_NVRTC_DIR)
run(${without} built/packed)
expect(" from kernels: ")
run(${without} built/packed built/kernels.pack)
expect(" from built/kernels.pack: ")
run(moved/bin/attnloom pack list built/kernels.pack)
expect("archs \"sm_80 sm_90 sm_90a\"")

# A manifest that changes makes the kernels anew, and one that is wrong stops the build with its line.
file(WRITE ${work}/packed/kernels.lua "return {'bf16 d=64'}\n")
run(${CMAKE_COMMAND} --build built)
run(moved/bin/attnloom pack list built/kernels.pack)
expect("problem \"bf16 d=64\" ")
execute_process(COMMAND built/packed WORKING_DIRECTORY ${work} RESULT_VARIABLE result ERROR_VARIABLE text)
if(result EQUAL 0)
    message(FATAL_ERROR "the program still has a kernel that its manifest has no more")
endif()
expect("{\"bf16 d=128 mask={k <= q}\", archs = {")
file(WRITE ${work}/packed/kernels.lua "return {\n'bf16 d=7'}\n")
execute_process(COMMAND ${CMAKE_COMMAND} --build built WORKING_DIRECTORY ${work} RESULT_VARIABLE result OUTPUT_VARIABLE text
    ERROR_VARIABLE text)
if(result EQUAL 0)
    message(FATAL_ERROR "a wrong manifest did not stop the build")
endif()
expect("kernels.lua:2: entry 1, \"bf16 d=7\": problem.d")

file(COPY ${SOURCE}/examples/packed/kernels.lua DESTINATION ${work}/packed)
run(moved/bin/attnloom pack packed/kernels.lua --arch 80,90 --embed -o kernels.c)
run(${C_COMPILER} -std=c99 -pedantic -Wall -Wextra -Werror -c kernels.c -o kernels.o)

# One manifest for two targets of a folder needs two names.
file(WRITE ${work}/twice/CMakeLists.txt "cmake_minimum_required(VERSION 3.22)
project(twice LANGUAGES C)
find_package(attnloom REQUIRED)
add_custom_target(a ALL)
add_custom_target(b ALL)
attnloom_add_kernels(TARGET a MANIFEST ../packed/kernels.lua ARCHS 80)
attnloom_add_kernels(TARGET b MANIFEST ../packed/kernels.lua ARCHS 80 NAME \${OTHER})
")
refuse(${CMAKE_COMMAND} -G ${GENERATOR} -S twice -B twice/once -DCMAKE_PREFIX_PATH=${work}/moved -DCMAKE_C_COMPILER=${C_COMPILER}
    -DOTHER=kernels)
expect("this folder has kernels named 'kernels' already: give these another NAME")
run(${CMAKE_COMMAND} -G ${GENERATOR} -S twice -B twice/named -DCMAKE_PREFIX_PATH=${work}/moved -DCMAKE_C_COMPILER=${C_COMPILER}
    -DOTHER=others)
run(${CMAKE_COMMAND} --build twice/named)
run(moved/bin/attnloom pack verify twice/named/others.pack)
find_program(PKG_CONFIG pkg-config)
if(PKG_CONFIG)
    file(GLOB_RECURSE pc ${work}/moved/*/attnloom.pc)
    get_filename_component(folder "${pc}" DIRECTORY)
    get_filename_component(library ${folder} DIRECTORY)
    set(ENV{PKG_CONFIG_PATH} ${folder})
    run(${PKG_CONFIG} --cflags --libs attnloom)
    separate_arguments(options UNIX_COMMAND "${text} ${C_FLAGS}")
    run(${C_COMPILER} packed/packed.c kernels.c -o by_pkg_config ${options})
    run(${without} LD_LIBRARY_PATH=${library} ./by_pkg_config)
    expect(" from kernels: ")
else()
    message(STATUS "pkg-config is not here: attnloom.pc was not tried")
endif()

# Without Lua and compilers.
set(MOST_BYTES 300000)
run(${CMAKE_COMMAND} -G ${GENERATOR} -S ${SOURCE} -B only -DATTNLOOM_RUNTIME_ONLY=ON -DCMAKE_BUILD_TYPE=Release
    -DCMAKE_INSTALL_PREFIX=${work}/small -DCMAKE_INSTALL_LIBDIR=lib -DCMAKE_C_COMPILER=${C_COMPILER})
run(${CMAKE_COMMAND} --build only)
run(${CMAKE_COMMAND} --install only --strip)
run(${CMAKE_COMMAND} -DNM=${NM} -DLIBRARY=small/lib/libattnloom.so -DLIST=${SOURCE}/cmake/symbols.txt
    -P ${SOURCE}/cmake/check_symbols.cmake)
file(REAL_PATH ${work}/small/lib/libattnloom.so library)
file(SIZE ${library} bytes)
message(STATUS "the library without generator and compilers has ${bytes} bytes")
if(bytes GREATER MOST_BYTES)
    message(FATAL_ERROR "${library} has ${bytes} bytes, at most ${MOST_BYTES} are wanted")
endif()
run(${C_COMPILER} packed/packed.c kernels.c -o with_packs_only -Ismall/include -Lsmall/lib -lattnloom)
run(${CMAKE_COMMAND} -E env LD_LIBRARY_PATH=${work}/small/lib ./with_packs_only)
expect(" from kernels: ")

# That package has nothing to make kernels with, and says so.
refuse(${CMAKE_COMMAND} -G ${GENERATOR} -S packed -B unpacked -DCMAKE_PREFIX_PATH=${work}/small -DCMAKE_C_COMPILER=${C_COMPILER})
expect("was built with ATTNLOOM_RUNTIME_ONLY")

# Folders may be given as absolute ones.
run(${CMAKE_COMMAND} -S ${SOURCE} -B only -DCMAKE_INSTALL_LIBDIR=${work}/apart/lib)
file(READ ${work}/only/attnloom.pc text)
expect("libdir=${work}/apart/lib\nincludedir=\${prefix}/include\n")
