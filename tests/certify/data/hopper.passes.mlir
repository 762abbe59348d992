    %mpmd_map3A_1 = arith.constant 229440 : i32 loc(#loc34)
    %mpmd_map3A_2 = arith.constant 384 : index loc(#loc34)
    %mpmd_map3A_3 = arith.constant 132 : index loc(#loc34)
    %mpmd_map3A_249 = gpu.launch async [%mpmd_map3A_4] blocks(%mpmd_map3A_250, %mpmd_map3A_251, %mpmd_map3A_252) in (%mpmd_map3A_256 = %mpmd_map3A_3, %mpmd_map3A_257 = %c1, %mpmd_map3A_258 = %c1) threads(%mpmd_map3A_253, %mpmd_map3A_254, %mpmd_map3A_255) in (%mpmd_map3A_259 = %mpmd_map3A_2, %mpmd_map3A_260 = %c1, %mpmd_map3A_261 = %c1) dynamic_shared_memory_size %mpmd_map3A_1 {
    %143 = gpu.launch async [%2] blocks(%mpmd_map3A_88, %mpmd_map3A_89, %mpmd_map3A_90) in (%mpmd_map3A_94 = %c132, %mpmd_map3A_95 = %c1, %mpmd_map3A_96 = %c1) threads(%mpmd_map3A_91, %mpmd_map3A_92, %mpmd_map3A_93) in (%mpmd_map3A_97 = %c384, %mpmd_map3A_98 = %c1, %mpmd_map3A_99 = %c1) dynamic_shared_memory_size %c229440_i32 {
