// Properties of the row store's kernels; see kv_tests.cpp.
#pragma once

void kv_tests();
