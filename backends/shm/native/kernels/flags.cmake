# The flags of each kernel file. Included by whoever compiles kernels/*.cpp.
# No product is contracted with a sum. Without a care for floating-point flags more loops become vectors; no result
# changes. (GCC 12 warns of its own avx512fintrin.h: maybe-uninitialized.)
set(UBEP_KERNEL_FLAGS -ffp-contract=off -fno-trapping-math)
set(UBEP_KERNEL_FLAGS_avx2 -mavx2 -mf16c)
set(UBEP_KERNEL_FLAGS_avx512 -mavx512f -mavx512bw -mavx512dq -mavx512vl -mprefer-vector-width=512
    -Wno-maybe-uninitialized)
foreach(isa scalar avx2 avx512)
  set(flags ${UBEP_KERNEL_FLAGS})
  if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
    list(APPEND flags ${UBEP_KERNEL_FLAGS_${isa}})
  endif()
  set_source_files_properties(${CMAKE_CURRENT_LIST_DIR}/${isa}.cpp PROPERTIES COMPILE_OPTIONS "${flags}")
endforeach()
