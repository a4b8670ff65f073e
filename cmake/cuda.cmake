# libverlc_cuda.so: src/device/cuda/**/*.cu, beside the program, which opens it at run time.
#
# nvcc is called by rules of our own: architectures are asked of it, the runtime is
# linked statically, cuBLASLt is opened at run time, and nothing of the toolkit but
# nvcc, its headers and libcudart_static.a is needed.
find_program(VERLC_NVCC nvcc HINTS ENV CUDA_HOME ENV CUDA_PATH /usr/local/cuda PATH_SUFFIXES bin)
if(NOT VERLC_NVCC)
  message(FATAL_ERROR "VERLC_CUDA needs nvcc: install the CUDA toolkit (12.4 or newer) or put nvcc on PATH")
endif()
execute_process(COMMAND ${VERLC_NVCC} --version OUTPUT_VARIABLE out COMMAND_ERROR_IS_FATAL ANY)
string(REGEX MATCH "release ([0-9]+\\.[0-9]+)" _ "${out}")
set(nvcc_version ${CMAKE_MATCH_1})
if(nvcc_version VERSION_LESS 12.4)
  message(FATAL_ERROR "VERLC_CUDA needs nvcc 12.4 or newer; ${VERLC_NVCC} is ${nvcc_version}")
endif()
execute_process(COMMAND ${VERLC_NVCC} --list-gpu-arch OUTPUT_VARIABLE nvcc_archs COMMAND_ERROR_IS_FATAL ANY)

string(REPLACE " " ";" cuda_archs "${VERLC_CUDA_ARCHS}")
if(NOT cuda_archs)
  foreach(arch 80 89 90a 100 120)
    string(REPLACE "a" "" base ${arch})
    if(nvcc_archs MATCHES "compute_${base}[^0-9]")
      list(APPEND cuda_archs ${arch})
    endif()
  endforeach()
endif()
set(gencode "")
set(arch_names "")
foreach(arch ${cuda_archs})
  list(APPEND gencode -gencode=arch=compute_${arch},code=sm_${arch})
  string(APPEND arch_names " sm_${arch}")
endforeach()
string(STRIP "${arch_names}" arch_names)
message(STATUS "CUDA backend: nvcc ${nvcc_version}, ${arch_names}")

set(nvcc_flags -std=c++17 -O3 ${gencode} -Xcompiler=-fPIC,-Wall,-Wextra -I${CMAKE_SOURCE_DIR}/src
  "-DVERLC_CUDA_ARCHS=\"${arch_names}\"" "-DVERLC_CUDA_ABI=\"${cuda_abi}\"")
if(VERLC_DIST)
  list(APPEND nvcc_flags -Xcompiler=-ffile-prefix-map=${CMAKE_SOURCE_DIR}/=)
else()
  list(APPEND nvcc_flags -lineinfo) # names this tree's files
endif()
file(GLOB_RECURSE cuda_sources CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/src/device/cuda/*.cu)
file(MAKE_DIRECTORY ${CMAKE_BINARY_DIR}/cuda)
set(cuda_objects "")
foreach(source ${cuda_sources})
  file(RELATIVE_PATH stem ${CMAKE_SOURCE_DIR}/src/device/cuda ${source})
  string(REPLACE "/" "_" stem ${stem})
  set(object ${CMAKE_BINARY_DIR}/cuda/${stem}.o)
  add_custom_command(OUTPUT ${object}
    COMMAND ${VERLC_NVCC} ${nvcc_flags} -MD -MF ${object}.d -MT ${object} -c ${source} -o ${object}
    DEPENDS ${source} DEPFILE ${object}.d COMMENT "nvcc ${stem}" VERBATIM)
  list(APPEND cuda_objects ${object})
endforeach()
set(cuda_library ${CMAKE_BINARY_DIR}/libverlc_cuda.so)
add_custom_command(OUTPUT ${cuda_library}
  COMMAND ${VERLC_NVCC} -shared -cudart=static ${gencode} -Xlinker=-soname,libverlc_cuda.so,--exclude-libs,ALL
    ${cuda_objects} -o ${cuda_library} # the static runtime brings -ldl -lpthread -lrt
  DEPENDS ${cuda_objects} COMMENT "linking libverlc_cuda.so" VERBATIM)
add_custom_target(verlc_cuda ALL DEPENDS ${cuda_library})
