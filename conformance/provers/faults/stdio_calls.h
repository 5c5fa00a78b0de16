// The stdio part of shim.c, included there: streams are seen at their entry points, since the writes inside libc are
// not looked up by name. fprintf, fputs and putc show only at the fflush or fclose that follows.
typedef FILE *(*open_function)(const char *, const char *);
typedef size_t (*write_function)(const void *, size_t, size_t, FILE *);
typedef int (*stream_function)(FILE *);

static int flags_of_mode(const char *mode) {
    int plus = 0;
    for (const char *c = mode; *c && *c != ','; c++) plus |= *c == '+';
    if (mode[0] == 'w') return (plus ? O_RDWR : O_WRONLY) | O_CREAT | O_TRUNC;
    if (mode[0] == 'a') return (plus ? O_RDWR : O_WRONLY) | O_CREAT | O_APPEND;
    return plus ? O_RDWR : O_RDONLY;
}

static struct tp_verdict enter(struct tp_session *armed, const struct tp_caller *who, long nr, long args[6]) {
    struct tp_verdict verdict;
    inside = 1;
    tp_begin(armed, who, nr, args, &verdict);
    obey_before(&verdict);
    return verdict;
}

static void leave(struct tp_session *armed, const struct tp_caller *who, const struct tp_verdict *verdict,
                  long result) {
    tp_end(who, armed, verdict->event, result);
    inside = 0;
    if (verdict->action == TP_TORN) die(TP_KILL);
    if (verdict->action == TP_ERRNO) errno = verdict->error;
}

EXPORT FILE *fopen(const char *path, const char *mode) {
    open_function real = (open_function)dlsym(RTLD_NEXT, "fopen");
    struct tp_session *armed = session;
    if (armed == NULL || inside) return real(path, mode);
    struct tp_caller who = self();
    long args[6] = {AT_FDCWD, (long)path, flags_of_mode(mode), 0666, 0, 0};
    struct tp_verdict verdict = enter(armed, &who, SYS_openat, args);
    FILE *file = verdict.action == TP_ERRNO ? NULL : real(path, mode);
    leave(armed, &who, &verdict, file != NULL ? fileno(file) : -(verdict.action == TP_ERRNO ? verdict.error : errno));
    return file;
}
ALIAS("fopen") FILE *fopen64(const char *, const char *);

EXPORT size_t fwrite(const void *data, size_t size, size_t count, FILE *file) {
    write_function real = (write_function)dlsym(RTLD_NEXT, "fwrite");
    struct tp_session *armed = session;
    if (armed == NULL || inside) return real(data, size, count, file);
    struct tp_caller who = self();
    long args[6] = {fileno(file), (long)(size * count), 0, 0, 0, 0};
    struct tp_verdict verdict = enter(armed, &who, TP_NR_FWRITE, args);
    if ((verdict.action == TP_SHORT || verdict.action == TP_TORN) && count > 1) count /= 2;
    size_t done = verdict.action == TP_ERRNO ? 0 : real(data, size, count, file);
    if (verdict.action == TP_TORN) ((stream_function)dlsym(RTLD_NEXT, "fflush"))(file);
    leave(armed, &who, &verdict, verdict.action == TP_ERRNO ? -verdict.error : (long)(done * size));
    return done;
}

static int on_stream(const char *name, long nr, FILE *file) {
    stream_function real = (stream_function)dlsym(RTLD_NEXT, name);
    struct tp_session *armed = session;
    if (armed == NULL || inside || file == NULL) return real(file);
    struct tp_caller who = self();
    long args[6] = {fileno(file), 0, 0, 0, 0, 0};
    struct tp_verdict verdict = enter(armed, &who, nr, args);
    int refused = verdict.action == TP_ERRNO;
    // A refused fclose still gives the stream back, as libc's does after a failing last write.
    int result = refused && nr == TP_NR_FFLUSH ? EOF : real(file);
    if (refused) result = EOF;
    leave(armed, &who, &verdict, result == 0 ? 0 : -(refused ? verdict.error : errno));
    return result;
}

EXPORT int fflush(FILE *file) { return on_stream("fflush", TP_NR_FFLUSH, file); }
EXPORT int fclose(FILE *file) { return on_stream("fclose", SYS_close, file); }
