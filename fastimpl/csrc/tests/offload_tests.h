// Entry points of the tests of the offload kernels.
#pragma once

void offload_tests();
void slab_tests();
