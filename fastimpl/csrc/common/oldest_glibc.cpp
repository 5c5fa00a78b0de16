// What the headers of a newer compiler and C library take for granted and older ones lack, for a library that is linked
// against an older glibc (OLDEST_GLIBC). It stays inside the library: see oldest_glibc.map.
#include <new>
#include <sstream>

extern "C" {
// Since glibc 2.32; counts of references are atomic where it is 0.
extern char __libc_single_threaded;
char __libc_single_threaded = 0;
}

namespace std {
// Since GCC 11.
void __throw_bad_array_new_length() { throw bad_array_new_length(); }
// Since GCC 9.
template basic_ostringstream<char>::basic_ostringstream();
template basic_stringstream<char>::basic_stringstream();
}  // namespace std
