/* A passthrough over FUSE in C: what the road through the kernel costs a server that only hands requests to the drive.
 *
 *     passthrough DIRECTORY MOUNTPOINT        serves until unmounted
 *
 * libfuse's low-level interface, like its example passthrough_ll, but with nodes in a hash table and no descriptor held for a
 * file: the example searches a list and keeps one descriptor for each name the kernel knows, which 20,000 files end. Only what the
 * bench asks for: no links, no renames, no extended attributes. One device, names up to 255 bytes, errors as the directory has them.
 */
#define FUSE_USE_VERSION 314
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <fuse_lowlevel.h>
#include <pthread.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define TIMEOUT 1.0 /* the default of libfuse, and of the other subjects of the bench */
#define BUCKETS (1 << 17)
#define THREADS 16

/* A name below a directory. Its number for the kernel is its address. `fd` (O_PATH) is held for directories only. */
struct node {
	struct node *parent, *next;
	unsigned long lookups, children;
	int fd, hashed;
	char name[];
};

static struct node root = {.fd = -1, .lookups = 1};
static struct node *table[BUCKETS];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static struct node *node_of(fuse_ino_t number)
{
	return number == FUSE_ROOT_ID ? &root : (struct node *)number;
}

static struct node **bucket(const struct node *parent, const char *name)
{
	unsigned long hash = (unsigned long)parent >> 4;
	for (; *name; name++)
		hash = hash * 31 + (unsigned char)*name;
	return &table[(hash ^ hash >> 17) % BUCKETS];
}

static void unhash(struct node *node)
{
	if (!node->hashed)
		return;
	struct node **at = bucket(node->parent, node->name);
	while (*at != node)
		at = &(*at)->next;
	*at = node->next;
	node->hashed = 0;
}

/* With the lock held: a node is kept while the kernel knows it or a child of it. */
static void let_go(struct node *node)
{
	while (node != &root && !node->lookups && !node->children) {
		struct node *parent = node->parent;
		unhash(node);
		if (node->fd >= 0)
			close(node->fd);
		free(node);
		parent->children--;
		node = parent;
	}
}

/* Fill `entry` for `name` in `parent`; the kernel knows it once more. An errno, or 0. */
static int look_up(fuse_ino_t number, const char *name, struct fuse_entry_param *entry)
{
	struct node *parent = node_of(number), *node, **at;
	memset(entry, 0, sizeof *entry);
	if (fstatat(parent->fd, name, &entry->attr, AT_SYMLINK_NOFOLLOW))
		return errno;
	entry->attr_timeout = entry->entry_timeout = TIMEOUT;
	pthread_mutex_lock(&lock);
	at = bucket(parent, name);
	for (node = *at; node; node = node->next)
		if (node->parent == parent && !strcmp(node->name, name))
			break;
	if (!node) {
		node = calloc(1, sizeof *node + strlen(name) + 1);
		strcpy(node->name, name);
		node->parent = parent;
		node->fd = S_ISDIR(entry->attr.st_mode) ? openat(parent->fd, name, O_PATH | O_NOFOLLOW) : -1;
		node->next = *at;
		node->hashed = 1;
		*at = node;
		parent->children++;
	}
	node->lookups++;
	pthread_mutex_unlock(&lock);
	entry->ino = (fuse_ino_t)node;
	return 0;
}

static void forget_node(fuse_ino_t number, uint64_t lookups)
{
	struct node *node = node_of(number);
	pthread_mutex_lock(&lock);
	node->lookups -= lookups;
	let_go(node);
	pthread_mutex_unlock(&lock);
}

static void do_init(void *userdata, struct fuse_conn_info *connection)
{
	connection->want |= connection->capable & (FUSE_CAP_SPLICE_READ | FUSE_CAP_SPLICE_WRITE | FUSE_CAP_SPLICE_MOVE);
}

static void do_lookup(fuse_req_t request, fuse_ino_t parent, const char *name)
{
	struct fuse_entry_param entry;
	int error = look_up(parent, name, &entry);
	if (error)
		fuse_reply_err(request, error);
	else
		fuse_reply_entry(request, &entry);
}

static void do_forget(fuse_req_t request, fuse_ino_t number, uint64_t lookups)
{
	forget_node(number, lookups);
	fuse_reply_none(request);
}

static void do_forget_multi(fuse_req_t request, size_t count, struct fuse_forget_data *forgets)
{
	for (size_t at = 0; at < count; at++)
		forget_node(forgets[at].ino, forgets[at].nlookup);
	fuse_reply_none(request);
}

static void do_getattr(fuse_req_t request, fuse_ino_t number, struct fuse_file_info *info)
{
	struct node *node = node_of(number);
	struct stat attr;
	int failed = info            ? fstat(info->fh, &attr)
		     : node->fd >= 0 ? fstatat(node->fd, "", &attr, AT_EMPTY_PATH)
				     : fstatat(node->parent->fd, node->name, &attr, AT_SYMLINK_NOFOLLOW);
	if (failed)
		fuse_reply_err(request, errno);
	else
		fuse_reply_attr(request, &attr, TIMEOUT);
}

static void do_setattr(fuse_req_t request, fuse_ino_t number, struct stat *attr, int valid, struct fuse_file_info *info)
{
	struct node *node = node_of(number);
	int failed = 0;
	if (valid & FUSE_SET_ATTR_SIZE) {
		int fd = info ? (int)info->fh : openat(node->parent->fd, node->name, O_WRONLY | O_NOFOLLOW);
		failed = fd < 0 || ftruncate(fd, attr->st_size);
		if (!info && fd >= 0)
			close(fd);
	}
	if (!failed && valid & FUSE_SET_ATTR_MODE)
		failed = node->fd >= 0 ? fchmodat(node->fd, ".", attr->st_mode, 0)
				       : fchmodat(node->parent->fd, node->name, attr->st_mode, 0);
	if (failed)
		fuse_reply_err(request, errno);
	else
		do_getattr(request, number, info);
}

static void reply_open(fuse_req_t request, int fd, struct fuse_file_info *info, const struct fuse_entry_param *entry)
{
	info->fh = fd;
	info->keep_cache = 1; /* nobody else changes the directory */
	if (entry ? fuse_reply_create(request, entry, info) : fuse_reply_open(request, info))
		close(fd);
}

static void do_open(fuse_req_t request, fuse_ino_t number, struct fuse_file_info *info)
{
	struct node *node = node_of(number);
	int fd = openat(node->parent->fd, node->name, (info->flags & ~O_NOFOLLOW) | O_CLOEXEC);
	if (fd < 0)
		fuse_reply_err(request, errno);
	else
		reply_open(request, fd, info, NULL);
}

static void do_create(fuse_req_t request, fuse_ino_t parent, const char *name, mode_t mode, struct fuse_file_info *info)
{
	struct fuse_entry_param entry;
	int fd = openat(node_of(parent)->fd, name, (info->flags | O_CREAT | O_CLOEXEC) & ~O_NOFOLLOW, mode), error;
	if (fd < 0) {
		fuse_reply_err(request, errno);
	} else if ((error = look_up(parent, name, &entry))) {
		close(fd);
		fuse_reply_err(request, error);
	} else {
		reply_open(request, fd, info, &entry);
	}
}

static void do_read(fuse_req_t request, fuse_ino_t number, size_t size, off_t offset, struct fuse_file_info *info)
{
	struct fuse_bufvec buffer = FUSE_BUFVEC_INIT(size);
	buffer.buf[0].flags = FUSE_BUF_IS_FD | FUSE_BUF_FD_SEEK;
	buffer.buf[0].fd = info->fh;
	buffer.buf[0].pos = offset;
	fuse_reply_data(request, &buffer, FUSE_BUF_SPLICE_MOVE);
}

static void do_write(fuse_req_t request, fuse_ino_t number, struct fuse_bufvec *from, off_t offset, struct fuse_file_info *info)
{
	struct fuse_bufvec to = FUSE_BUFVEC_INIT(fuse_buf_size(from));
	to.buf[0].flags = FUSE_BUF_IS_FD | FUSE_BUF_FD_SEEK;
	to.buf[0].fd = info->fh;
	to.buf[0].pos = offset;
	ssize_t count = fuse_buf_copy(&to, from, 0);
	if (count < 0)
		fuse_reply_err(request, -count);
	else
		fuse_reply_write(request, count);
}

static void do_flush(fuse_req_t request, fuse_ino_t number, struct fuse_file_info *info)
{
	fuse_reply_err(request, close(dup(info->fh)) ? errno : 0);
}

static void do_fsync(fuse_req_t request, fuse_ino_t number, int datasync, struct fuse_file_info *info)
{
	fuse_reply_err(request, (datasync ? fdatasync(info->fh) : fsync(info->fh)) ? errno : 0);
}

static void do_release(fuse_req_t request, fuse_ino_t number, struct fuse_file_info *info)
{
	close(info->fh);
	fuse_reply_err(request, 0);
}

static void do_mkdir(fuse_req_t request, fuse_ino_t parent, const char *name, mode_t mode)
{
	if (mkdirat(node_of(parent)->fd, name, mode))
		fuse_reply_err(request, errno);
	else
		do_lookup(request, parent, name);
}

static void remove_name(fuse_req_t request, fuse_ino_t number, const char *name, int flags)
{
	struct node *parent = node_of(number);
	if (unlinkat(parent->fd, name, flags)) {
		fuse_reply_err(request, errno);
		return;
	}
	pthread_mutex_lock(&lock);
	for (struct node *node = *bucket(parent, name); node; node = node->next)
		if (node->parent == parent && !strcmp(node->name, name)) {
			unhash(node); /* a later file of this name is another one */
			break;
		}
	pthread_mutex_unlock(&lock);
	fuse_reply_err(request, 0);
}

static void do_unlink(fuse_req_t request, fuse_ino_t parent, const char *name)
{
	remove_name(request, parent, name, 0);
}

static void do_rmdir(fuse_req_t request, fuse_ino_t parent, const char *name)
{
	remove_name(request, parent, name, AT_REMOVEDIR);
}

struct listing {
	DIR *stream;
	struct dirent *entry; /* read and not given out yet */
	off_t offset;
};

static void do_opendir(fuse_req_t request, fuse_ino_t number, struct fuse_file_info *info)
{
	struct listing *listing = calloc(1, sizeof *listing);
	int fd = openat(node_of(number)->fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	if (fd < 0 || !(listing->stream = fdopendir(fd))) {
		fuse_reply_err(request, errno);
		free(listing);
		return;
	}
	info->fh = (uint64_t)listing;
	fuse_reply_open(request, info);
}

static void list(fuse_req_t request, fuse_ino_t number, size_t size, off_t offset, struct fuse_file_info *info, int plus)
{
	struct listing *listing = (struct listing *)info->fh;
	char *buffer = malloc(size);
	size_t used = 0;
	if (offset != listing->offset) {
		seekdir(listing->stream, offset);
		listing->entry = NULL;
		listing->offset = offset;
	}
	for (;;) {
		if (!listing->entry && !(listing->entry = readdir(listing->stream)))
			break;
		struct dirent *found = listing->entry;
		int dot = !strcmp(found->d_name, ".") || !strcmp(found->d_name, "..");
		struct fuse_entry_param entry = {.attr = {.st_ino = found->d_ino, .st_mode = DTTOIF(found->d_type)}};
		size_t needs;
		if (plus && !dot && look_up(number, found->d_name, &entry)) {
			listing->entry = NULL; /* gone meanwhile */
			continue;
		}
		needs = plus ? fuse_add_direntry_plus(request, buffer + used, size - used, found->d_name, &entry, found->d_off)
			     : fuse_add_direntry(request, buffer + used, size - used, found->d_name, &entry.attr, found->d_off);
		if (needs > size - used) {
			if (plus && !dot)
				forget_node(entry.ino, 1);
			break;
		}
		used += needs;
		listing->offset = found->d_off;
		listing->entry = NULL;
	}
	fuse_reply_buf(request, buffer, used);
	free(buffer);
}

static void do_readdir(fuse_req_t request, fuse_ino_t number, size_t size, off_t offset, struct fuse_file_info *info)
{
	list(request, number, size, offset, info, 0);
}

static void do_readdirplus(fuse_req_t request, fuse_ino_t number, size_t size, off_t offset, struct fuse_file_info *info)
{
	list(request, number, size, offset, info, 1);
}

static void do_releasedir(fuse_req_t request, fuse_ino_t number, struct fuse_file_info *info)
{
	struct listing *listing = (struct listing *)info->fh;
	closedir(listing->stream);
	free(listing);
	fuse_reply_err(request, 0);
}

static void do_statfs(fuse_req_t request, fuse_ino_t number)
{
	struct statvfs space;
	if (fstatvfs(root.fd, &space))
		fuse_reply_err(request, errno);
	else
		fuse_reply_statfs(request, &space);
}

static const struct fuse_lowlevel_ops operations = {
	.init = do_init, .lookup = do_lookup, .forget = do_forget, .forget_multi = do_forget_multi, .getattr = do_getattr,
	.setattr = do_setattr, .open = do_open, .create = do_create, .read = do_read, .write_buf = do_write, .flush = do_flush,
	.fsync = do_fsync, .release = do_release, .mkdir = do_mkdir, .unlink = do_unlink, .rmdir = do_rmdir, .opendir = do_opendir,
	.readdir = do_readdir, .readdirplus = do_readdirplus, .releasedir = do_releasedir, .statfs = do_statfs,
};

int main(int count, char **words)
{
	char *options[] = {words[0], "-o", "default_permissions,fsname=passthrough,subtype=passthrough"};
	struct fuse_args args = FUSE_ARGS_INIT(3, options);
	struct fuse_session *session;
	struct fuse_loop_config *config = fuse_loop_cfg_create();
	int failed = 1;
	if (count != 3 || (root.fd = open(words[1], O_PATH | O_DIRECTORY)) < 0) {
		fprintf(stderr, "passthrough DIRECTORY MOUNTPOINT\n");
		return 2;
	}
	umask(0);
	session = fuse_session_new(&args, &operations, sizeof operations, NULL);
	if (session && !fuse_set_signal_handlers(session) && !fuse_session_mount(session, words[2])) {
		fuse_loop_cfg_set_clone_fd(config, 1);
		fuse_loop_cfg_set_max_threads(config, THREADS);
		fuse_loop_cfg_set_idle_threads(config, THREADS);
		failed = fuse_session_loop_mt(session, config);
		fuse_session_unmount(session);
	}
	return failed != 0;
}
