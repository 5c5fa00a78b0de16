// Faults that are planted together in one program, which is told by a number which of them it has. Goes first.
#pragma once

inline int simt_planted = 0;

#include <simt/prove.h>
#include <string>

namespace planted {

// `main` of such a program: "--only 'name 3'" is the proof "name" with the third fault, "name 0" that with none.
inline int main(int count, char** arguments) {
  std::string name;
  for (int i = 1; i + 1 < count; ++i) {
    if (std::string(arguments[i]) != "--only") continue;
    name = arguments[i + 1];
    const auto space = name.rfind(' ');
    if (space == std::string::npos || name.find_first_not_of("0123456789", space + 1) != std::string::npos) continue;
    simt_planted = std::stoi(name.substr(space + 1));
    name.resize(space);
    arguments[i + 1] = name.data();
  }
  return simt::prover::main(count, arguments);
}

}  // namespace planted
