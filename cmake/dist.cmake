# What `make dist` packs: the tree of the tarball. packaging/ puts the same files into a wheel.
# A file for users is one more install() line here; the man pages are made in scripts/dist.sh.
set(archives "")
foreach(lib ${small_libraries})
  string(MAKE_C_IDENTIFIER "dep_${lib}" id)
  list(APPEND archives ${${id}_LINK_LIBRARIES})
endforeach()
foreach(archive ${archives})
  if(NOT archive MATCHES "\\.a$")
    message(FATAL_ERROR "VERLC_DIST links the small libraries statically, and ${archive} has no .a; scripts/setup.sh installs them")
  endif()
  get_filename_component(name ${archive} NAME)
  list(APPEND names ${name})
endforeach()
# scripts/dist.sh takes their licences along.
list(JOIN archives "\n" lines)
file(WRITE ${CMAKE_BINARY_DIR}/archives.txt "${lines}\n")
# The program exports its own functions to libverlc_cuda.so, not theirs.
list(JOIN names ":" names)
target_link_options(verlc PRIVATE -Wl,--exclude-libs,${names})

install(TARGETS verlc DESTINATION .)
if(VERLC_CUDA)
  install(PROGRAMS ${cuda_library} DESTINATION .)
endif()
install(DIRECTORY python DESTINATION . USE_SOURCE_PERMISSIONS PATTERN __pycache__ EXCLUDE) # verlc_standin has programs
install(FILES LICENSE README.md CHANGES.md DESIGN.md DESTINATION .)
install(DIRECTORY docs DESTINATION .)
install(PROGRAMS tools/run_plot.py DESTINATION share/verlc)

# For programs of include/verlc.h (docs/extending.md). scripts/dist.sh makes lib/libverlc.a of this one and the small libraries.
set(PC_INCLUDE "\${pcfiledir}/../../include")
set(PC_LIB "\${pcfiledir}/..")
set(PC_REQUIRES "")
configure_file(cmake/verlc.pc.in verlc.pc @ONLY)
install(DIRECTORY include DESTINATION .)
install(DIRECTORY examples DESTINATION .)
install(FILES ${CMAKE_BINARY_DIR}/verlc.pc DESTINATION lib/pkgconfig)
install(FILES share/verlc.bash DESTINATION share/bash-completion/completions RENAME verlc)
install(FILES share/_verlc DESTINATION share/zsh/site-functions)
install(FILES share/verlc.fish DESTINATION share/fish/vendor_completions.d)

# The wheel's metadata: the helpers' packages; cuBLASLt, half a gigabyte, as the extra verlc[cuda], NCCL as verlc[nccl], what
# examples/http_reward.py takes as verlc[http].
file(STRINGS python/requirements.txt requirements REGEX "^[^#]")
list(TRANSFORM requirements REPLACE "(.+)" "\"\\1\"")
list(JOIN requirements ", " WHEEL_DEPENDENCIES)
set(WHEEL_CUDA_EXTRA "")
if(VERLC_CUDA)
  string(REGEX MATCH "^[0-9]+" major ${nvcc_version})
  math(EXPR next "${major} + 1")
  set(package nvidia-cublas)
  if(major LESS 13)
    set(package nvidia-cublas-cu${major})
  endif()
  set(WHEEL_CUDA_EXTRA "cuda = [\"${package}>=${nvcc_version},<${next}\"]\nnccl = [\"nvidia-nccl-cu${major}>=2.18,<3\"]\n")
endif()
configure_file(packaging/pyproject.toml.in pyproject.toml @ONLY)
