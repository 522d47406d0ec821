/* Loads of many files, in C so that sixteen threads do not measure the language.
 *
 *     files_load create DIRECTORY THREADS SECONDS FILES_MAX BYTES    new files, created, written and closed
 *     files_load list DIRECTORY                                      every name read, each with a stat
 *     files_load names DIRECTORY                                     the names alone, one a line, in the order of the listing
 *     files_load stat DIRECTORY SECONDS          < names             lstat of each, in the order given
 *     files_load read DIRECTORY THREADS SECONDS  < names             each opened, read whole and closed, once, in random order
 *     files_load unlink DIRECTORY SECONDS        < names             each removed, in the order given
 *
 * Prints one JSON object: what was done, in how many seconds, median and 99th percentile of one in microseconds, and bytes read
 * or written. Each ends when there is nothing left or its time is over. The first error ends it with exit code 1.
 */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define THREADS_MAX 256
#define BYTES_MAX (1 << 20)

static const char *directory;
static char **names;
static long name_count, files_max, file_bytes;
static double seconds;
static atomic_long next;
static pthread_barrier_t barrier;
static char content[BYTES_MAX];

struct worker {
	pthread_t thread;
	int number;
	long count, room, bytes;
	uint64_t begin_ns, end_ns;
	uint32_t *latencies_ns;
};

static uint64_t now_ns(void)
{
	struct timespec now;
	clock_gettime(CLOCK_MONOTONIC, &now);
	return now.tv_sec * 1000000000ull + now.tv_nsec;
}

static void fail(const char *what, const char *path)
{
	fprintf(stderr, "%s %s: %s\n", what, path, strerror(errno));
	exit(1);
}

static void done(struct worker *worker, uint64_t begin, uint64_t end)
{
	if (worker->count == worker->room) {
		worker->room = worker->room ? 2 * worker->room : 1 << 14;
		worker->latencies_ns = realloc(worker->latencies_ns, worker->room * sizeof(uint32_t));
	}
	worker->latencies_ns[worker->count++] = end - begin > UINT32_MAX ? UINT32_MAX : end - begin;
}

static void create(struct worker *worker, long at)
{
	char path[4096];
	snprintf(path, sizeof path, "%s/%d-%ld", directory, worker->number, at);
	int fd = open(path, O_WRONLY | O_CREAT | O_EXCL, 0644);
	if (fd < 0 || (file_bytes && write(fd, content, file_bytes) != file_bytes) || close(fd))
		fail("create", path);
	worker->bytes += file_bytes;
}

static void look(struct worker *worker, long at)
{
	char path[4096];
	struct stat attr;
	snprintf(path, sizeof path, "%s/%s", directory, names[at]);
	if (lstat(path, &attr))
		fail("stat", path);
	(void)worker;
}

static void read_whole(struct worker *worker, long at)
{
	static _Thread_local char buffer[BYTES_MAX];
	char path[4096];
	snprintf(path, sizeof path, "%s/%s", directory, names[at]);
	int fd = open(path, O_RDONLY);
	ssize_t count = fd < 0 ? -1 : read(fd, buffer, sizeof buffer);
	if (count <= 0 || close(fd))
		fail("read", path);
	worker->bytes += count;
}

static void remove_file(struct worker *worker, long at)
{
	char path[4096];
	snprintf(path, sizeof path, "%s/%s", directory, names[at]);
	if (unlink(path))
		fail("unlink", path);
	(void)worker;
}

static void (*work)(struct worker *, long);

static void *loop(void *argument)
{
	struct worker *worker = argument;
	long limit = names ? name_count : files_max, at;
	pthread_barrier_wait(&barrier);
	uint64_t last = worker->begin_ns = now_ns(), now, end = last + seconds * 1e9;
	while (last < end && (at = atomic_fetch_add(&next, 1)) < limit) {
		work(worker, at);
		now = now_ns();
		done(worker, last, now);
		last = now;
	}
	worker->end_ns = last;
	return NULL;
}

static int by_size(const void *one, const void *other)
{
	uint32_t a = *(const uint32_t *)one, b = *(const uint32_t *)other;
	return a < b ? -1 : a > b;
}

static void print(struct worker *workers, int threads, double took_s)
{
	long count = 0, bytes = 0, at = 0;
	for (int number = 0; number < threads; number++) {
		count += workers[number].count;
		bytes += workers[number].bytes;
	}
	uint32_t *all = malloc((count + 1) * sizeof(uint32_t));
	for (int number = 0; number < threads; number++) {
		if (workers[number].count)
			memcpy(all + at, workers[number].latencies_ns, workers[number].count * sizeof(uint32_t));
		at += workers[number].count;
	}
	qsort(all, count, sizeof(uint32_t), by_size);
	printf("{\"count\": %ld, \"seconds\": %.6f, \"p50_us\": %.2f, \"p99_us\": %.2f, \"bytes\": %ld}\n", count, took_s,
	       count ? all[count / 2] / 1e3 : 0.0, count ? all[count * 99 / 100] / 1e3 : 0.0, bytes);
}

static void run(int threads)
{
	static struct worker workers[THREADS_MAX];
	uint64_t begin = UINT64_MAX, end = 0;
	if (threads < 1 || threads > THREADS_MAX)
		exit(2);
	pthread_barrier_init(&barrier, NULL, threads);
	for (int number = 0; number < threads; number++) {
		workers[number].number = number;
		pthread_create(&workers[number].thread, NULL, loop, &workers[number]);
	}
	for (int number = 0; number < threads; number++) {
		pthread_join(workers[number].thread, NULL);
		begin = workers[number].begin_ns < begin ? workers[number].begin_ns : begin;
		end = workers[number].end_ns > end ? workers[number].end_ns : end;
	}
	print(workers, threads, (end - begin) / 1e9);
}

/* Every name, with a stat of each as `ls -l` does it, or printed. */
static void list(int with_stat)
{
	static struct worker worker;
	struct dirent *found;
	struct stat attr;
	uint64_t begin = now_ns(), last = begin, now;
	DIR *stream = opendir(directory);
	if (!stream)
		fail("list", directory);
	while (errno = 0, (found = readdir(stream))) {
		if (!strcmp(found->d_name, ".") || !strcmp(found->d_name, ".."))
			continue;
		if (!with_stat) {
			puts(found->d_name);
			continue;
		}
		if (fstatat(dirfd(stream), found->d_name, &attr, AT_SYMLINK_NOFOLLOW))
			fail("stat", found->d_name);
		now = now_ns();
		done(&worker, last, now);
		last = now;
	}
	if (errno)
		fail("list", directory);
	closedir(stream);
	if (with_stat)
		print(&worker, 1, (now_ns() - begin) / 1e9);
}

static void read_names(int shuffled)
{
	static char line[4096];
	long room = 0;
	while (fgets(line, sizeof line, stdin)) {
		if (name_count == room) {
			room = room ? 2 * room : 1 << 14;
			names = realloc(names, room * sizeof *names);
		}
		line[strcspn(line, "\n")] = 0;
		names[name_count++] = strdup(line);
	}
	if (!name_count) {
		fprintf(stderr, "no names\n");
		exit(1);
	}
	srandom(time(NULL) ^ getpid());
	for (long at = name_count - 1; shuffled && at > 0; at--) {
		long other = random() % (at + 1);
		char *name = names[at];
		names[at] = names[other];
		names[other] = name;
	}
}

int main(int count, char **words)
{
	const char *verb = count > 2 ? words[1] : "";
	int threads = 1;
	directory = count > 2 ? words[2] : "";
	if (!strcmp(verb, "list") || !strcmp(verb, "names")) {
		list(verb[0] == 'l');
	} else if (!strcmp(verb, "create") && count == 7) {
		work = create;
		threads = atoi(words[3]);
		seconds = atof(words[4]);
		files_max = atol(words[5]);
		file_bytes = atol(words[6]);
		FILE *noise = fopen("/dev/urandom", "r");
		if (file_bytes > BYTES_MAX || !noise || fread(content, 1, file_bytes, noise) != (size_t)file_bytes)
			return 2;
		run(threads);
	} else if ((!strcmp(verb, "stat") || !strcmp(verb, "unlink")) && count == 4) {
		work = verb[0] == 's' ? look : remove_file;
		seconds = atof(words[3]);
		read_names(0);
		run(1);
	} else if (!strcmp(verb, "read") && count == 5) {
		work = read_whole;
		threads = atoi(words[3]);
		seconds = atof(words[4]);
		read_names(1);
		run(threads);
	} else {
		fprintf(stderr, "files_load create|list|names|stat|read|unlink, see its source\n");
		return 2;
	}
	return 0;
}
