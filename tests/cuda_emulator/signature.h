// For the launcher: a kernel's parameter types as text, a call with an array of pointers to values, and its library.
#pragma once
#include "numbers.h"

namespace emulator {

// Same letters as NumPy's dtype.str; half is f2, and bfloat16, which NumPy lacks, is b2.
template <class T>
const char *type_code() {
    if constexpr (std::is_same_v<T, __half>) return "f2";
    else if constexpr (std::is_same_v<T, __nv_bfloat16>) return "b2";
    else if constexpr (std::is_same_v<T, float>) return "f4";
    else if constexpr (std::is_same_v<T, double>) return "f8";
    else {
        static_assert(std::is_integral_v<T>, "parameters of kernels are numbers and pointers to numbers");
        constexpr const char *codes[2][4] = {{"u1", "u2", "u4", "u8"}, {"i1", "i2", "i4", "i8"}};
        return codes[std::is_signed_v<T>][sizeof(T) == 1 ? 0 : sizeof(T) == 2 ? 1 : sizeof(T) == 4 ? 2 : 3];
    }
}

// Appends the code of T at `end`, behind a comma where it is not the first; returns the new end. No std::string here:
// its functions would be shared with the machine, which must not run code with hooks.
template <class T>
char *append_code(char *start, char *end) {
    using Pointee = std::remove_pointer_t<T>;
    const char *parts[] = {end == start ? "" : ",", std::is_const_v<Pointee> ? "const " : "",
                           type_code<std::remove_const_t<Pointee>>(), std::is_pointer_v<T> ? "*" : ""};
    for (const char *part : parts)
        while (*part) *end++ = *part++;
    return end;
}

template <class... Types>
const char *signature(void (*)(Types...)) {
    static char text[sizeof...(Types) * 12 + 1];
    char *end = text;
    ((end = append_code<std::remove_cv_t<Types>>(text, end)), ...);
    *end = 0;
    return text;
}

template <class... Types, size_t... I>
EMULATOR_PRIMITIVE void call(void (*kernel)(Types...), void **values, std::index_sequence<I...>) {
    kernel(*static_cast<std::remove_cv_t<Types> *>(values[I])...);
}

template <class... Types>
EMULATOR_PRIMITIVE void call_with(void (*kernel)(Types...), void **values) {
    call(kernel, values, std::index_sequence_for<Types...>{});
}

}  // namespace emulator

#define EMULATOR_KERNEL(name, most_threads)                                                       \
    extern "C" void emulator_call_##name(void **values) { emulator::call_with(name, values); }    \
    extern "C" const char *emulator_signature_##name() { return emulator::signature(name); }      \
    extern "C" int emulator_most_threads_##name() { return most_threads; }

// All static __shared__ variables lie in one section (device.h), the library's other data around it.
extern "C" {
extern char __start_emulated_shared[] __attribute__((weak, visibility("hidden")));
extern char __stop_emulated_shared[] __attribute__((weak, visibility("hidden")));
extern const char __ehdr_start __attribute__((visibility("hidden")));
extern const char _end __attribute__((visibility("hidden")));
}
#define EMULATOR_LIBRARY(checked)                                                                         \
    extern "C" const emulator::Library emulator_library = {&__ehdr_start, &_end, __start_emulated_shared, \
                                                           __stop_emulated_shared, checked};
