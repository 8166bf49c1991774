// Stands for torch in the tests of the fence: calls the allocator from C++ and tells what was thrown.
#include <cstdio>
#include <exception>
#include <functional>
#include <string>
#include <sys/types.h>

extern "C" const char *caught(void *(*allocate)(ssize_t, int, void *), ssize_t size, int device)
{
    static std::string message;
    std::function<void *(size_t, int, void *)> call = allocate;
    try {
        call(size, device, nullptr);
        message.clear();
    } catch (const std::exception &error) {
        message = error.what();
    }
    return message.c_str();
}
