/* The device's half of a kernel, where NVIDIA's tools look for it. */
    .section .nv_fatbin, "a"
    .balign 16
    .globl cutlass_ops_image
    .hidden cutlass_ops_image
cutlass_ops_image:
    .incbin "kernel.fatbin"
    .section .note.GNU-stack, "", %progbits
