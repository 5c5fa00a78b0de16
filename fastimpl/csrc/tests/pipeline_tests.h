#pragma once

#include <algorithm>

#include "kvstore_tests.h"

// Pooling, the fused step and the movement of ids.
void pipeline_tests();
