/* Fails chosen calls that change the files below one folder, or that send on a socket of Python's.

   gcc -shared -fPIC -O1 -o shim.so shim.c -ldl; LD_PRELOAD=shim.so python …, then through ctypes: faults_watch(folder,
   log) begins to count and to note every call, a line each; faults_arm(kind, about, n, errno, mode) chooses what fails:
   the n-th call of the kind on this path, the n-th send that begins so, or with an empty `about` the n-th of all.
   Sits at libc's border, where also TensorFlow's and TensorBoard's C++ come through; libc's own stdio does not, so the
   functions of stdio that write are here too. What a process writes to mapped memory is not seen.
*/
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum kind { OPEN, WRITE, SYNC, RENAME, MKDIR, REMOVE, LINK, TRUNCATE, ALLOCATE, TIMES, CLOSE, SEND, KINDS };
static const char *const names[] = {"open",     "write",    "sync",  "rename", "mkdir", "remove", "link",
                                    "truncate", "allocate", "times", "close",  "send"};
/* ONCE: the n-th call of the kind. ON: it, and every call from then on, but for closing: all sends where it is one, and
   where it is none all but those. HALF: of the n-th write half is done, which is no failure; FULL: so is this one, and
   then all writing calls fail. */
enum mode { ONCE, ON, HALF, FULL };

static char folder[PATH_MAX];
static size_t folder_length;
static int log_fd = -1;
static atomic_long counts[KINDS];
static atomic_int is_on;
static int armed_kind = -1, armed_errno, armed_mode;
static long armed_n;
static char armed_about[PATH_MAX];
static size_t armed_length;
static atomic_long armed_seen;

#define REAL(name) \
    static __typeof__(&name) real; \
    if (!real) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

void faults_watch(const char *below, const char *log) {
    log_fd = -1;
    folder_length = strlen(below);
    memcpy(folder, below, folder_length + 1);
    for (int kind = 0; kind < KINDS; kind++) counts[kind] = 0;
    is_on = 0;
    armed_kind = -1;
    armed_seen = 0;
    log_fd = (int)syscall(SYS_openat, AT_FDCWD, log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
}

void faults_arm(const char *kind, const char *about, long n, int error, int mode) {
    for (int k = 0; k < KINDS; k++)
        if (!strcmp(names[k], kind)) armed_kind = k;
    armed_length = strlen(about);
    memcpy(armed_about, about, armed_length + 1);
    if (armed_length && armed_kind != SEND) armed_length++; /* its end too: the whole path */
    armed_n = n, armed_errno = error, armed_mode = mode;
}

static void note(const char *what, enum kind kind, long n, const char *about) {
    char line[PATH_MAX + 64];
    int length = snprintf(line, sizeof line, "%s %s %ld %s\n", what, names[kind], n, about);
    syscall(SYS_write, log_fd, line, length < (int)sizeof line ? length : (int)sizeof line - 1);
}

/* Counts a call; returns 0, or what the call is to fail with, or -1 where half of it is to be done. */
static int due(enum kind kind, const char *about) {
    int before = errno, failure = 0;
    long n = ++counts[kind];
    if ((int)kind == armed_kind && !strncmp(about, armed_about, armed_length) && ++armed_seen == armed_n) {
        failure = armed_mode == HALF || armed_mode == FULL ? -1 : armed_errno;
        is_on = armed_mode == ON || armed_mode == FULL;
    } else if (is_on && kind != CLOSE && (kind == SEND) == (armed_kind == SEND) &&
               (armed_mode == ON || kind == WRITE || kind == OPEN || kind == MKDIR))
        failure = armed_errno;
    note(failure ? "hit" : "call", kind, n, about);
    errno = before;
    return failure;
}

static int due_path(enum kind kind, int at, const char *path) {
    char full[PATH_MAX], base[PATH_MAX], link[64];
    int before = errno;
    if (log_fd < 0 || !path) return 0;
    if (path[0] != '/') {
        snprintf(link, sizeof link, at == AT_FDCWD ? "/proc/self/cwd" : "/proc/self/fd/%d", at);
        ssize_t length = readlink(link, base, sizeof base - 1);
        if (length < 0) length = 0;
        base[length] = 0;
        if (snprintf(full, sizeof full, "%s/%s", base, path) >= (int)sizeof full) return 0;
        path = full;
    }
    errno = before;
    return strncmp(path, folder, folder_length) ? 0 : due(kind, path + folder_length);
}

static int due_fd(enum kind kind, int fd) {
    char path[PATH_MAX], link[64];
    int before = errno;
    if (log_fd < 0 || fd < 0) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    errno = before;
    if (length < 0) return 0;
    path[length] = 0;
    if (strncmp(path, folder, folder_length)) return 0;
    if (kind == CLOSE && (fcntl(fd, F_GETFL) & O_ACCMODE) == O_RDONLY) return 0;
    return due(kind, path + folder_length);
}

static int fail(int error) {
    errno = error;
    return -1;
}

#define ON_PATH(type, name, parameters, arguments, kind, at, path) \
    type name parameters { \
        REAL(name); \
        int error = due_path(kind, at, path); \
        return error > 0 ? fail(error) : real arguments; \
    }
#define ON_FD(type, name, parameters, arguments, kind) \
    type name parameters { \
        REAL(name); \
        int error = due_fd(kind, fd); \
        return error > 0 ? fail(error) : real arguments; \
    }

#define OPENS(flags) ((flags) & (O_CREAT | O_WRONLY | O_RDWR | O_TRUNC))
#define OPEN_CALL(name) \
    int name(const char *path, int flags, ...) { \
        REAL(name); \
        va_list more; \
        va_start(more, flags); \
        mode_t mode = va_arg(more, mode_t); \
        va_end(more); \
        int error = OPENS(flags) ? due_path(OPEN, AT_FDCWD, path) : 0; \
        return error > 0 ? fail(error) : real(path, flags, mode); \
    }
#define OPENAT_CALL(name) \
    int name(int at, const char *path, int flags, ...) { \
        REAL(name); \
        va_list more; \
        va_start(more, flags); \
        mode_t mode = va_arg(more, mode_t); \
        va_end(more); \
        int error = OPENS(flags) ? due_path(OPEN, at, path) : 0; \
        return error > 0 ? fail(error) : real(at, path, flags, mode); \
    }
#define FOPEN_CALL(name) \
    FILE *name(const char *restrict path, const char *restrict mode) { \
        REAL(name); \
        int error = strpbrk(mode, "wa+") ? due_path(OPEN, AT_FDCWD, path) : 0; \
        if (error > 0) errno = error; \
        return error > 0 ? NULL : real(path, mode); \
    }
OPEN_CALL(open)
OPEN_CALL(open64)
OPENAT_CALL(openat)
OPENAT_CALL(openat64)
FOPEN_CALL(fopen)
FOPEN_CALL(fopen64)

#define HALF_OF(error, size) ((error) < 0 && (size) > 1 ? (size) / 2 : (size))
ssize_t write(int fd, const void *data, size_t size) {
    REAL(write);
    int error = due_fd(WRITE, fd);
    return error > 0 ? fail(error) : real(fd, data, HALF_OF(error, size));
}
ssize_t pwrite(int fd, const void *data, size_t size, off_t at) {
    REAL(pwrite);
    int error = due_fd(WRITE, fd);
    return error > 0 ? fail(error) : real(fd, data, HALF_OF(error, size), at);
}
ssize_t pwrite64(int fd, const void *data, size_t size, off64_t at) {
    REAL(pwrite64);
    int error = due_fd(WRITE, fd);
    return error > 0 ? fail(error) : real(fd, data, HALF_OF(error, size), at);
}
size_t fwrite(const void *restrict data, size_t size, size_t count, FILE *restrict file) {
    REAL(fwrite);
    int error = due_fd(WRITE, fileno(file));
    if (!error) return real(data, size, count, file);
    errno = error > 0 ? error : ENOSPC; /* stdio goes on by itself after half a write, and finds the disk full */
    return error > 0 ? 0 : real(data, 1, size * count / 2, file) / (size ? size : 1);
}
int fflush(FILE *file) {
    REAL(fflush);
    int error = file ? due_fd(WRITE, fileno(file)) : 0;
    return error > 0 ? fail(error) : real(file);
}
ON_FD(ssize_t, writev, (int fd, const struct iovec *parts, int count), (fd, parts, count), WRITE)
ON_FD(ssize_t, pwritev, (int fd, const struct iovec *parts, int count, off_t at), (fd, parts, count, at), WRITE)
ON_FD(ssize_t, sendfile, (int fd, int from, off_t *at, size_t size), (fd, from, at, size), WRITE)
ON_FD(ssize_t, sendfile64, (int fd, int from, off64_t *at, size_t size), (fd, from, at, size), WRITE)
ON_FD(ssize_t, copy_file_range, (int from, off64_t *a, int fd, off64_t *b, size_t size, unsigned flags),
      (from, a, fd, b, size, flags), WRITE)

ON_FD(int, fsync, (int fd), (fd), SYNC)
ON_FD(int, fdatasync, (int fd), (fd), SYNC)

ON_PATH(int, rename, (const char *path, const char *to), (path, to), RENAME, AT_FDCWD, to)
ON_PATH(int, renameat, (int at, const char *path, int to_at, const char *to), (at, path, to_at, to), RENAME, to_at, to)
ON_PATH(int, renameat2, (int at, const char *path, int to_at, const char *to, unsigned flags),
        (at, path, to_at, to, flags), RENAME, to_at, to)
ON_PATH(int, mkdir, (const char *path, mode_t mode), (path, mode), MKDIR, AT_FDCWD, path)
ON_PATH(int, mkdirat, (int at, const char *path, mode_t mode), (at, path, mode), MKDIR, at, path)
ON_PATH(int, unlink, (const char *path), (path), REMOVE, AT_FDCWD, path)
ON_PATH(int, unlinkat, (int at, const char *path, int flags), (at, path, flags), REMOVE, at, path)
ON_PATH(int, rmdir, (const char *path), (path), REMOVE, AT_FDCWD, path)
ON_PATH(int, remove, (const char *path), (path), REMOVE, AT_FDCWD, path)
ON_PATH(int, link, (const char *from, const char *path), (from, path), LINK, AT_FDCWD, path)
ON_PATH(int, linkat, (int from_at, const char *from, int at, const char *path, int flags),
        (from_at, from, at, path, flags), LINK, at, path)
ON_PATH(int, symlink, (const char *from, const char *path), (from, path), LINK, AT_FDCWD, path)
ON_PATH(int, symlinkat, (const char *from, int at, const char *path), (from, at, path), LINK, at, path)
ON_PATH(int, truncate, (const char *path, off_t size), (path, size), TRUNCATE, AT_FDCWD, path)
ON_PATH(int, truncate64, (const char *path, off64_t size), (path, size), TRUNCATE, AT_FDCWD, path)
ON_FD(int, ftruncate, (int fd, off_t size), (fd, size), TRUNCATE)
ON_FD(int, ftruncate64, (int fd, off64_t size), (fd, size), TRUNCATE)
ON_FD(int, futimens, (int fd, const struct timespec times[2]), (fd, times), TIMES)
ON_PATH(int, utimensat, (int at, const char *path, const struct timespec times[2], int flags), (at, path, times, flags),
        TIMES, at, path)

/* These two return their error. */
int posix_fallocate(int fd, off_t at, off_t size) {
    REAL(posix_fallocate);
    int error = due_fd(ALLOCATE, fd);
    return error > 0 ? error : real(fd, at, size);
}
int posix_fallocate64(int fd, off64_t at, off64_t size) {
    REAL(posix_fallocate64);
    int error = due_fd(ALLOCATE, fd);
    return error > 0 ? error : real(fd, at, size);
}

/* The descriptor is closed all the same, as Linux does. */
int close(int fd) {
    REAL(close);
    int error = due_fd(CLOSE, fd), returned = real(fd);
    return error > 0 ? fail(error) : returned;
}
int fclose(FILE *file) {
    REAL(fclose);
    int error = due_fd(CLOSE, fileno(file)), returned = real(file);
    return error > 0 ? fail(error) : returned;
}

/* Horovod's and MPI's own sends are not the package's: Python's module _socket makes those, or Python itself has it. */
static int due_send(void *caller, const void *data, size_t size) {
    Dl_info from;
    char about[160] = {0};
    if (log_fd < 0 || !dladdr(caller, &from) || !from.dli_fname) return 0;
    const char *slash = strrchr(from.dli_fname, '/'), *name = slash ? slash + 1 : from.dli_fname;
    if (strncmp(name, "_socket", 7) && strncmp(name, "python", 6) && strncmp(name, "libpython", 9)) return 0;
    for (size_t i = 0; data && i < size && i < sizeof about - 1; i++) {
        char letter = ((const char *)data)[i];
        about[i] = letter < ' ' ? ' ' : letter;
    }
    return due(SEND, about);
}
ssize_t send(int fd, const void *data, size_t size, int flags) {
    REAL(send);
    int error = due_send(__builtin_return_address(0), data, size);
    return error > 0 ? fail(error) : real(fd, data, HALF_OF(error, size), flags);
}
ssize_t sendto(int fd, const void *data, size_t size, int flags, const struct sockaddr *to, socklen_t length) {
    REAL(sendto);
    int error = due_send(__builtin_return_address(0), data, size);
    return error > 0 ? fail(error) : real(fd, data, size, flags, to, length);
}
ssize_t sendmsg(int fd, const struct msghdr *message, int flags) {
    REAL(sendmsg);
    const struct iovec *first = message->msg_iovlen ? message->msg_iov : NULL;
    int error = due_send(__builtin_return_address(0), first ? first->iov_base : NULL, first ? first->iov_len : 0);
    return error > 0 ? fail(error) : real(fd, message, flags);
}
