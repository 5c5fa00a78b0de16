// Entry point of the tests of the offload kernels.
#pragma once

void offload_tests();
